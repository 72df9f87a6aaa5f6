"""What an evaluation leaves behind: eval.json, eval.md and passk.png, and for the Hub
model_index.yaml and eval_results.yaml."""

import json
import math
from collections import Counter
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.repocard_data import eval_results_to_model_index

from data.sets import SETS
from experiment.card import scores
from experiment.completions import writing
from experiment.files import write
from experiment.tables import markdown_table

# the name of a set's task in its eval.yaml on the Hub, where it is not our name of the set
TASKS = {"aime26": "MathArena/aime_2026"}


def short_names(names):
    """{name: as tables and figures show it}: of a file its last part, where that is no other's."""
    count = Counter(Path(name).name for name in names)
    return {name: Path(name).name if count[Path(name).name] == 1 else name for name in names}


def decimals(value):
    return "-" if value is None else f"{value:.3f}"


def results_table(results, ks):
    """results: {benchmark: its numbers, as eval.benchmark_results returns them}. In brackets is the
    standard error over the problems; "-" stands for what cannot be told. The mean reward stands
    there where rewards are not all 0 and 1."""
    head = ["benchmark", "problems", "mean@n", "95% interval", *[f"pass@{k} (se)" for k in ks],
            "maj@n", "truncated", "length"]
    graded = any(not math.isclose(numbers["reward"], numbers[f"mean@{numbers['samples']}"],
                                  abs_tol=1e-9) for numbers in results.values())
    head += ["mean reward"] * graded
    rows, names = [], short_names(results)
    for name, numbers in results.items():
        n = numbers["samples"]
        rows.append([
            names[name], numbers["problems"],
            f"{numbers[f'mean@{n}']:.3f} (n={n}, se {decimals(numbers['standard_error'])})",
            "-".join(map(decimals, numbers["interval"])),
            *[f"{numbers[f'pass@{k}']:.3f} ({decimals(numbers[f'pass@{k}_stderr'])})" for k in ks],
            decimals(numbers.get(f"maj@{n}")), decimals(numbers["truncated_frac"]),
            f"{numbers['mean_length']:.0f}", *[decimals(numbers["reward"])] * graded])
    return markdown_table(head, rows)


def sampling(settings):
    """{flag: value} of what completions depend on, as far as it is known: not of a file's."""
    names = ("temperature", "top_p", "max_tokens")
    return {name: settings[name] for name in names if settings[name] is not None}


def notes(settings, numbers):
    """How a score came about, in words: the Hub shows them beside it."""
    n, (low, high) = numbers["samples"], numbers["interval"]
    parts = [f"pass@1 as the mean of {n} completions of each of {numbers['problems']} problems",
             f"95% interval {100 * low:.1f} to {100 * high:.1f}",
             *[f"{name} {value:g}" for name, value in sampling(settings).items()]]
    given = {name: settings[name] for name in ("limit", "lcb_release", "lcb_from", "lcb_to")}
    parts += [f"--{name} {value}" for name, value in given.items() if value]
    return ", ".join(parts + ["answers outside of a box count, too"] * settings["lenient"])


def hub_entries(settings, results):
    """-> entries of .eval_results/ for the test splits of the Hub's data sets, in percent, and the
    names of the other benchmarks, which have no page there that could show them."""
    there = [name for name in results if name in SETS and settings["split"] == "test"]
    entries = [EvalResultEntry(
        dataset_id=SETS[name].hub, task_id=TASKS.get(name, name), notes=notes(settings, numbers),
        value=round(100 * numbers[f"mean@{numbers['samples']}"], 2))
        for name, numbers in results.items() if name in there]
    return entries, [name for name in results if name not in there]


def model_index(settings, results):
    """All results in the form of a model card's front matter."""
    found, seen = [], Counter()
    for name, numbers in results.items():
        label = Path(name).name  # no paths of the machine: files of one name are numbered
        seen[label] += 1
        if seen[label] > 1:
            label = f"{label} ({seen[label]})"
        known = dict(problems=numbers["problems"], **sampling(settings))
        found += scores(name, numbers, numbers["samples"], known, settings["split"], label)
    model = Path(settings["model"] or "unknown").name
    return {"model-index": eval_results_to_model_index(model, found)}


def write_for_hub(out, settings, results):
    """Writes model_index.yaml and, where a data set of the Hub is among them, eval_results.yaml."""
    dump = dict(sort_keys=False, allow_unicode=True)
    write(out / "model_index.yaml", yaml.safe_dump(model_index(settings, results), **dump))
    entries, left_out = hub_entries(settings, results)
    if entries:
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), **dump)
        write(out / "eval_results.yaml", text)
        if left_out:
            print(f"eval_results.yaml is without {', '.join(left_out)}: no test split of the Hub")


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
        write_for_hub(out, settings, results)
    print(table)
