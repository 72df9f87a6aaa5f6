"""Tables in Markdown."""


def markdown_table(head, rows):
    """head: the columns' titles. rows: lists of cells, in which numbers are formatted already."""
    first, *others = ["| " + " | ".join(map(str, cells)) + " |" for cells in (head, *rows)]
    return "\n".join([first, "|---" * len(head) + "|", *others])


def results_table(results):
    """results: {benchmark: benchmark_results}. In brackets: the standard error; "-": unknown."""
    def shown(value, digits=3):
        return "-" if value is None else f"{value:.{digits}f}"
    rows = []
    for name, r in results.items():
        n = r["samples"]
        rows.append({
            "benchmark": name, "problems": r["problems"],
            "mean@n": f"{r[f'mean@{n}']:.3f} (n={n}, se {shown(r[f'mean@{n}_stderr'])})",
            "95% interval": "-".join(map(shown, r["interval"])),
            **{f"{metric} (se)": f"{r[metric]:.3f} ({shown(r[f'{metric}_stderr'])})"
               for metric in r if metric.startswith("pass@") and f"{metric}_stderr" in r},
            "maj@n": shown(r.get(f"maj@{n}")), "unreadable": shown(r["unreadable_frac"]),
            "truncated": shown(r["truncated_frac"]), "length": shown(r["mean_length"], 0),
            "reward": shown(r["reward"])})
    return markdown_table(rows[0], [row.values() for row in rows])


def differences_table(benchmarks):
    """benchmarks: {name: stats.paired's}."""
    return markdown_table(
        ("benchmark", "", "here", "there", "difference", "95% interval, over problems"),
        [(name, metric, f"{d['value']:.3f}", f"{d['other']:.3f}", f"{d['difference']:+.3f}",
          f"{d['low']:+.3f} to {d['high']:+.3f}")
         for name, metrics in benchmarks.items() for metric, d in metrics.items()])
