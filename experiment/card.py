"""README.md of a checkpoint: the model card that the Hub shows when the folder is uploaded.

It is a function of the run's flags, log and config.json. It has no times and no paths of the
machine, so that a resumed run writes the same card.
"""

import inspect
import json
import re
import shlex
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard, ModelCardData

import data
import losses
from data.recipe import BASE, settings_of
from data.sets import SETS
from experiment.flags import FREE, OF_THIS_START
from experiment.tables import markdown_table

NAME = "README.md"
# a card is for others: where the logs went and what the machine had room for is not in its command
OWN = OF_THIS_START | FREE - {"rollouts", "eval_every", "eval_data", "eval_problems",
                              "eval_samples"}
ROWS = 20  # of the table of evaluations
QUESTION = "What is the sum of the first 100 positive integers?"


def text(args, method, tokenizer, out, rollout):
    """The card of the checkpoint after `rollout`.

    args, method: of train.py. out: the run's folder, whose metrics.jsonl and config.json hold what
    is said of evaluations, versions and commit."""
    config = json.loads((out / "config.json").read_text())
    with open(out / "metrics.jsonl") as file:
        records = [json.loads(line) for line in file]
    evaluations = evaluations_of(records, args)
    base = base_of_run(args)
    sections = [
        f"# {base} after {rollout} rollouts of {args.loss}", origin(args, rollout, records),
        "## Use", use(args, tokenizer),
        "## Method", method_section(args, method),
        "## Training", training(args, method, config),
        "## Evaluation", evaluation(args, evaluations, rollout),
        "## Not known", unknown(args, evaluations, rollout),
        "## Versions", versions(config)]
    front = ModelCardData(**metadata(args, base, evaluations, rollout))
    return str(ModelCard(f"---\n{front.to_yaml()}\n---\n\n" + "\n\n".join(sections) + "\n"))


# ---------------------------------------------------------------------------- names

def hub_id(args):
    """The base's id on the Hub, None for a folder."""
    return None if Path(args.model).exists() else args.model


def is_embedded(args):
    """Is the model the embedded base that train.py takes for this data where none is given?"""
    return args.model == BASE


def base_of_run(args):
    return "The embedded base" if is_embedded(args) else Path(args.model).name


def short(name):
    """A data set's name; of a file, its last part."""
    return Path(name).name if name.endswith(".jsonl") else name


# ---------------------------------------------------------------------------- front matter

def metadata(args, base, evaluations, rollout):
    """-> the fields of the front matter. Evaluations of other weights than these stay out."""
    fields = dict(
        base_model=hub_id(args), library_name="transformers", pipeline_tag="text-generation",
        datasets=[SETS[args.data].hub] if args.data in SETS else None,
        tags=["reinforcement-learning", "rlvr", "nanorlvr", args.loss])
    if evaluations and evaluations[-1]["rollout"] == rollout:
        settings = dict(problems=args.eval_problems, temperature=args.temperature,
                        max_tokens=args.max_tokens)
        name = args.eval_data or args.data
        fields.update(model_name=f"{base}, {args.loss}",
                      eval_results=scores(name, evaluations[-1], args.eval_samples, settings))
    return fields


def scores(name, numbers, n, settings, split="test", label=None):
    """-> EvalResults of one data set, for a model-index: mean@n, which estimates pass@1, and
    pass@n, as shares.

    name: as --data takes it. numbers: {metric: value}, with _stderr for standard errors. settings:
    what the completions depend on. label: what the card calls the set, in place of its name."""
    spec, label = SETS.get(name), label or short(name)
    where = dict(dataset_type=spec.hub if spec else label, dataset_name=label,
                 dataset_config=spec and spec.config,
                 dataset_split=spec.splits.get(split) if spec else None)
    results = []
    for metric, kind in {f"mean@{n}": "pass@1", f"pass@{n}": f"pass@{n}"}.items():
        if metric not in numbers or results and n == 1:
            continue
        error = numbers.get(f"{metric}_stderr")
        known = "" if error is None else f", standard error {error:.4f}"
        results.append(EvalResult(
            task_type="text-generation", metric_type=kind, metric_name=metric + known,
            metric_value=round(numbers[metric], 4), metric_args=dict(samples=n, **settings),
            **where))
    return results


def evaluations_of(records, args):
    """-> [{rollout, step, mean@n, pass@n, both with _stderr}] of the run's evaluation set."""
    prefix = f"eval/{args.eval_data or args.data}/"
    return [dict(rollout=record["rollout"], step=record.get("step", 0),
                 **{key.removeprefix(prefix): value for key, value in record.items()
                    if key.startswith(prefix)})
            for record in records if f"{prefix}mean@{args.eval_samples}" in record]


# ---------------------------------------------------------------------------- the text

def origin(args, rollout, records):
    """What the model is: base, data with its licence, how much training."""
    if is_embedded(args):
        base = "nanoRLVR's embedded base, a tiny model that is trained on generated puzzles"
    elif hub_id(args):
        base = f"[{args.model}](https://huggingface.co/{args.model})"
    else:
        base = f"`{Path(args.model).name}`, a model from a folder"
    if spec := SETS.get(args.data):
        problems = (f"[{spec.hub}](https://huggingface.co/datasets/{spec.hub}) (licence: "
                    f"{spec.licence})")
    elif args.data.endswith(".jsonl"):
        problems = f"`{short(args.data)}`, a file that is not here"
    else:
        problems = f"`{args.data}`, which are generated"
    done = records[-1]
    return (f"A model that learnt from verifiable rewards: {base}, was trained with the method "
            f"`{args.loss}` of nanoRLVR on the problems of {problems}. It saw {rollout} rollouts "
            f"of {args.problems_per_rollout} problems with {args.group_size} completions each: "
            f"{done['step']:,} optimizer steps and {done['tokens']:,} sampled tokens.")


def use(args, tokenizer):
    """Two pieces of Python that sample: with transformers and with vLLM."""
    prompt, chat = example_prompt(args, tokenizer)
    name, call = f"prompt = {prompt!r}", "chat" if chat else "generate"
    how = f" (`--template {args.template}`)" if args.template else ""
    return f"""It was trained on prompts of this form{how}, at temperature {args.temperature:g}, \
with completions of at most {args.max_tokens} tokens.

```python
from transformers import pipeline
{name}
model = pipeline("text-generation", "USER/NAME")
print(model(prompt, do_sample=True, temperature={args.temperature}, \
max_new_tokens={args.max_tokens})[0]["generated_text"])
```

With vLLM:

```python
from vllm import LLM, SamplingParams
{name}
settings = SamplingParams(temperature={args.temperature}, max_tokens={args.max_tokens})
print(LLM("USER/NAME").{call}(prompt, settings)[0].outputs[0].text)
```"""


def example_prompt(args, tokenizer):
    """-> a text, or the messages of a chat, as data.encode makes them; and whether it is a chat.
    The problem is generated, never one of a data set, whose licence may not allow that."""
    made = args.data not in SETS and not args.data.endswith(".jsonl")
    problem = data.load(args.data, "train")[0] if made else dict(
        prompt=QUESTION, reward=SETS[args.data].reward if args.data in SETS else "")
    if not tokenizer.chat_template or args.template in ("none", "r1_zero", "orz"):
        prompt = tokenizer.decode(data.encode(tokenizer, problem, args.template))
        return prompt.removeprefix(tokenizer.bos_token or ""), False  # it is added again
    messages = problem.get("messages") or [dict(role="user", content=problem["prompt"])]
    if args.template == "qwen_boxed" or not args.template and problem["reward"] == "math":
        messages = [dict(role="system", content=data.BOXED),
                    dict(role="user", content=problem["prompt"])]
    return messages, True


def method_section(args, method):
    """The row with its values, the formula of each cell, and where it comes from."""
    notes = json.loads((Path(losses.__file__).parent / "docs" / "methods.json").read_text())
    source = notes.get(args.loss, {}).get("source") or method.source or "none given"
    link = re.sub(r"arXiv (\d{4}\.\d{5})", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    named = [(axis, getattr(method, axis)) for axis in losses.AXES]
    named += [("pass", f) for f in method.passes if f is not losses.every_token]
    formulas = [f"{label:<10} " + inspect.getdoc(f).split("\n\n")[0].replace("\n", "\n" + " " * 11)
                for label, f in named]
    return (f"Source of `{args.loss}`: {link}.\n\n```\n{losses.describe(args.loss, method)}\n\n"
            + "\n".join(formulas) + "\n```")


def command(args):
    """train.py with the flags that have another value than its own default, and --dtype, whose
    default is the machine's."""
    recipe = settings_of(args.model)
    words = ["python", "train.py", "--loss", args.loss]
    given = dict(vars(args), model=None if is_embedded(args) else hub_id(args)
                 or Path(args.model).name)
    for name, default in {}.items():
        value = given[name]
        usual = value == default and value == recipe.get(name, value)
        if name == "lr" and args.lora_rank or name == "dtype":
            usual = False
        if name in OWN or name == "loss" or value is None or usual:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            words += [f"--{name}", short(value) if isinstance(value, str) else str(value)]
    return shlex.join(words)


def training(args, method, config):
    """The command, and what was not so from the start of a run that was continued."""
    lines, now = [f"```sh\n{command(args)}\n```"], config["flags"]
    changes = [", ".join(
        f"`--{name}` was {short(str(value))}" for name, value in before["flags"].items()
        if False and name not in OWN and value != now.get(name))
        for before in config["before"]]
    following = [*changes, ""][1:]
    for before, changed, after in zip(config["before"], changes, following, strict=True):
        if changed and changed != after:  # where it was resumed without a change, once is enough
            lines.append(f"Until rollout {before['until_rollout']}, {changed}.")
    return "\n\n".join(lines)


def evaluation(args, evaluations, rollout):
    """A table of the run's evaluations, at most ROWS of them, with 95% intervals."""
    if not evaluations:
        return "The run had no evaluation (`--eval_every 0`)."
    n, last = args.eval_samples, evaluations[-1]
    every = -(-len(evaluations) // ROWS)
    shown = [e for i, e in enumerate(evaluations) if i % every == 0 or e is last]
    # pass@n is there where n is a power of two
    metrics = [name for name in (f"mean@{n}", f"pass@{n}") if name in last]
    rows = [[e["rollout"], e["step"]] + [cell for name in metrics
                                         for cell in (f"{e[name]:.3f}", interval(e, name))]
            for e in shown]
    head = ["rollout", "optimizer steps"]
    head += [cell for name in metrics for cell in (name, "95% interval")]
    of = "" if every == 1 else f"; one evaluation in {every} is shown, and the last"
    return (f"Held-out problems of `{short(args.eval_data or args.data)}`: {args.eval_problems}, "
            f"with {n} completions each at temperature {args.temperature:g}{of}. mean@{n} is the "
            "share of right completions, pass@k the chance that one of k is right. Intervals are "
            "the mean and 1.96 standard errors over the problems.\n\n" + markdown_table(head, rows))


def interval(numbers, metric):
    """The 95% interval of a mean, of its standard error over the problems, in words."""
    error = numbers.get(f"{metric}_stderr")
    if error is None:
        return "-"
    low, high = numbers[metric] - 1.96 * error, numbers[metric] + 1.96 * error
    return f"{max(0, low):.3f} to {min(1, high):.3f}"


def unknown(args, evaluations, rollout):
    """What a reader might take for known, as a list."""
    points = ["The licence is that of its base, which a run does not know. The front matter has "
              "no `license` before somebody writes it there."]
    if is_embedded(args):
        points = ["The weights come from generated puzzles alone. The front matter has no "
                  "`license` before somebody writes it there."]
    if not evaluations or evaluations[-1]["rollout"] != rollout:
        points.append(f"The weights after rollout {rollout} were not evaluated.")
    points += [
        "This is one run of one seed: the intervals leave out by how much other runs differ.",
        "What is not in the evaluation was not looked at: other tasks, other languages, safety."]
    if not is_embedded(args):
        points.append("Nobody looked whether the base had seen the evaluated problems before.")
    return "\n".join(f"- {point}" for point in points)


def versions(config):
    """Packages and commit, of each part of a run that was continued with others."""
    parts = []
    for part in [*config["before"], config]:
        packages = ", ".join(f"{name} {number}" for name, number in part["versions"].items())
        commit = part["git"] or "unknown"
        changed = " with changes to its files" if commit.endswith("+") else ""
        line = f"commit {commit.rstrip('+')}{changed}; {packages}"
        if line not in parts:
            parts.append(line)
    return "\n\n".join(f"nanoRLVR, {line}." for line in parts)
