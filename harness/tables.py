"""Tables in Markdown."""

from harness.stats import powers_of_two


def markdown_table(head, rows):
    """head: the columns' titles. rows: lists of cells, in which numbers are formatted already."""
    lines = [head, *rows]
    texts = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    return "\n".join([texts[0], "|---" * len(head) + "|", *texts[1:]])


def results_table(results):
    """results: {benchmark: its numbers}. In brackets is the standard error; "-" is unknown. Below
    it is a sentence on each benchmark of which more than half of the answers are unreadable."""
    def shown(value):
        return "-" if value is None else f"{value:.3f}"
    rows = [{"benchmark": name, "problems": r["problems"],
             "mean@n": f"{r[f'mean@{n}']:.3f} (n={n}, se {shown(r[f'mean@{n}_stderr'])})",
             "95% interval": "-".join(map(shown, r["interval"])),
             **{f"pass@{k} (se)": f"{r[f'pass@{k}']:.3f} ({shown(r[f'pass@{k}_stderr'])})"
                for k in powers_of_two(n)},
             "maj@n": shown(r.get(f"maj@{n}")), "unreadable": shown(r["unreadable_frac"]),
             "truncated": shown(r["truncated_frac"]),
             "length": f"{r['mean_length']:.0f}", "reward": shown(r["reward"])}
            for name, r in results.items() for n in [r["samples"]]]
    return "\n\n".join([markdown_table(list(rows[0]), [row.values() for row in rows]), *(
        f"{name}: in {r['unreadable_frac']:.0%} of the completions no answer can be read; is the "
        "--template the model's?" for name, r in results.items() if r["unreadable_frac"] > 0.5)])


def differences_table(benchmarks):
    """benchmarks: {name: stats.paired's}."""
    rows = [(name, metric, f"{d['value']:.3f}", f"{d['other']:.3f}", f"{d['difference']:+.3f}",
             f"{d['low']:+.3f} to {d['high']:+.3f}")
            for name, metrics in benchmarks.items() for metric, d in metrics.items()]
    return markdown_table(("benchmark", "", "here", "there", "difference",
                           "95% interval, over problems"), rows)
