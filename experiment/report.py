"""What an evaluation leaves behind: eval.json, eval.md and passk.png."""

import json
from collections import Counter
from pathlib import Path

from experiment.completions import writing
from experiment.files import write
from experiment.tables import markdown_table


def short_names(names):
    """{name: as tables and figures show it}: of a file its last part, where that is no other's."""
    count = Counter(Path(name).name for name in names)
    return {name: Path(name).name if count[Path(name).name] == 1 else name for name in names}


def decimals(value):
    return "-" if value is None else f"{value:.3f}"


def results_table(results, ks):
    """results: {benchmark: its numbers, as eval.benchmark_results returns them}. In brackets is the
    standard error over the problems; "-" stands for what cannot be told."""
    head = ["benchmark", "problems", "mean@n", "95% interval", *[f"pass@{k} (se)" for k in ks],
            "maj@n", "truncated", "length"]
    rows, names = [], short_names(results)
    for name, numbers in results.items():
        n = numbers["samples"]
        rows.append([
            names[name], numbers["problems"],
            f"{numbers[f'mean@{n}']:.3f} (n={n}, se {decimals(numbers['standard_error'])})",
            "-".join(map(decimals, numbers["interval"])),
            *[f"{numbers[f'pass@{k}']:.3f} ({decimals(numbers[f'pass@{k}_stderr'])})" for k in ks],
            decimals(numbers.get(f"maj@{n}")), decimals(numbers["truncated_frac"]),
            f"{numbers['mean_length']:.0f}"])
    return markdown_table(head, rows)


def write_report(out, settings, results, ks):
    """Writes the files into the folder `out` and prints the table. Raises RunFailed."""
    from analysis import figures, runs
    from experiment.log import versions
    table, names = results_table(results, ks), short_names(results)
    content = dict(settings=settings, versions=versions(), results=results)
    curves = {names[name]: {k: runs.one_seed(numbers, f"pass@{k}") for k in ks}
              for name, numbers in results.items()}
    with writing(f"the results in {out}"):
        write(out / "eval.md", table + "\n")
        write(out / "eval.json", json.dumps(content, indent=1))
        figures.passk(curves, out / "passk.png", figures.ERRORS)
    print(table)
