"""What an evaluation leaves behind: eval.json, eval.md and passk.png."""

import json

from experiment.files import write
from experiment.tables import markdown_table


def results_table(results, ks):
    """results: {benchmark: its numbers, as eval.benchmark_results returns them}."""
    head = ["benchmark", "problems", "mean@n", "95% interval", *[f"pass@{k}" for k in ks],
            "maj@n", "truncated", "length"]
    rows = []
    for name, numbers in results.items():
        n = numbers["samples"]
        low, high = numbers["interval"]
        vote = numbers.get(f"maj@{n}")
        rows.append([
            name, numbers["problems"],
            f"{numbers[f'mean@{n}']:.3f} (n={n}, se {numbers['standard_error']:.3f})",
            f"{low:.3f}-{high:.3f}", *[f"{numbers[f'pass@{k}']:.3f}" for k in ks],
            "-" if vote is None else f"{vote:.3f}",
            f"{numbers['truncated_frac']:.3f}", f"{numbers['mean_length']:.0f}"])
    return markdown_table(head, rows)


def write_report(out, settings, results, ks):
    """Writes the files into the folder `out` and prints the table."""
    from analysis import figures
    from experiment.log import versions
    table = results_table(results, ks)
    write(out / "eval.md", table + "\n")
    content = dict(settings=settings, versions=versions(), results=results)
    write(out / "eval.json", json.dumps(content, indent=1))
    curves = {name: {k: numbers[f"pass@{k}"] for k in ks} for name, numbers in results.items()}
    figures.passk(curves, out / "passk.png")
    print(table)
