"""Evaluation: any Hugging Face model on any of data's problems, avg@n, unbiased pass@k, maj@n, with intervals.

    python eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmarks aime24,amc23 --samples 16 --out evals/qwen
    python eval.py --completions evals/qwen/completions.jsonl --benchmarks aime24,amc23 --out evals/again     grade only

The same command again continues where it was cut off. train.py's --eval_every goes through `sample` and `summarise` too.
"""

import argparse
import itertools
import json
import math
import os
import random
import sys
from collections import Counter, defaultdict
from math import comb
from pathlib import Path

import data
import sandbox
from rewards import Unparsed, final_answer, grade
from sampler import default_kind, eos_ids, make_sampler, seed_of

CHUNK = 1024  # completions sampled, graded and written at once


def pass_at_k(n, correct, k):
    """The chance that k of n samples, drawn without replacement, hold a correct one (arXiv 2107.03374, eq. 1)."""
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} needs at least {k} samples of each problem, there are {n}")
    return 1 - comb(n - correct, k) / comb(n, k)


def powers_of_two(n):
    """1, 2, 4, ... up to n: the k of pass@k worth showing for n samples."""
    return [2**i for i in range(n.bit_length())]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def majority(answers, rewards):
    """maj@n of one problem: the reward of its most frequent answer; of several equally frequent ones, their mean."""
    reward_of, votes = dict(zip(answers, rewards)), Counter(a for a in answers if a is not None)
    most = max(votes.values(), default=0)
    return mean(reward_of[a] for a, v in votes.items() if v == most) if votes else 0.0


def vote(completion):
    """The answer that a completion votes for in maj@n, None where it has none."""
    from answers import clean, number, tight
    try:
        text, _ = clean(final_answer(completion))
    except Unparsed:
        return None
    return tight(text) if number(text) is None else number(text)  # 0.5 and 1/2 are one answer


def interval(values, draws=2000):
    """95% percentile interval of the bootstrap of the mean: over problems (samples of one are not independent), or over seeds. All
    resamples where they are at most 10,000 (5 values: 3,125), else `draws` of them. One value stands for both ends."""
    n, rng = len(values), random.Random(0)
    resamples = itertools.product(values, repeat=n) if n**n <= 10_000 else (rng.choices(values, k=n) for _ in range(draws))
    means = sorted(map(mean, resamples))
    return means[int(0.025 * len(means))], means[math.ceil(0.975 * len(means)) - 1]


def sample(sampler, tokenizer, problems, samples, *, seed, temperature, max_tokens, top_p=1.0, template=None):
    """-> for each problem its completions as rows {completion, reward, tokens, truncated}, and the grader's counters."""
    prompts = [data.encode(tokenizer, p, template) for p in problems]
    groups = sampler.sample(prompts, samples, seed=seed, temperature=temperature, max_tokens=max_tokens, top_p=top_p)
    texts = [[data.decode(tokenizer, c, prompt) for c in group] for prompt, group in zip(prompts, groups)]
    rewards, counters = grade(problems, texts)
    return [[dict(completion=t, score=r, tokens=len(c.tokens), truncated=c.truncated) for t, r, c in zip(*columns)]
            for columns in zip(texts, rewards, groups)], counters


def summarise(groups, ks):
    """groups: for each problem its rows. -> {mean@n, pass@k, truncated_frac, mean_length}"""
    n, correct = len(groups[0]), [sum(row["score"] == 1 for row in rows) for rows in groups]
    return {f"mean@{n}": mean(c / n for c in correct), **{f"pass@{k}": mean(pass_at_k(n, c, k) for c in correct) for k in ks},
            "truncated_frac": mean(row["truncated"] for rows in groups for row in rows),
            "mean_length": mean(row["tokens"] for rows in groups for row in rows)}


# ---------------------------------------------------------------------------- the command

def refuse(message):
    print(f"eval.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse_args(argv=None):
    parser = argparse.ArgumentParser(prog="eval.py", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse
    parser.add_argument("--model", help="Hugging Face folder or id; without it the embedded base")
    parser.add_argument("--benchmarks", default="countdown", help=f"of {', '.join(data.names())}, or files, with commas between")
    parser.add_argument("--data_dir", help="folder of local JSONL files, with the Hub's field names, instead of the Hub")
    parser.add_argument("--split", default="test", help="train or test (test)")
    parser.add_argument("--limit", type=int, default=0, help="the first so many problems of each; 0 is all")
    parser.add_argument("--samples", type=int, default=16, help="completions of each problem (16)")
    parser.add_argument("--k", help="the k of pass@k, with commas between; default 1, 2, 4, ... up to --samples")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top_p", type=float, default=1.0)
    parser.add_argument("--max_tokens", type=int, help="longest completion; default 16 for the embedded base, else 8192")
    parser.add_argument("--max_prompt_tokens", type=int, default=2048)
    parser.add_argument("--template", choices=data.TEMPLATES, help="default: by task and model, see data/README.md")
    parser.add_argument("--lcb_release", help="release_v1 ... release_v6 (release_v6), or v1 ... v6 for one file")
    parser.add_argument("--lcb_from", help="contests from this day on, 2024-08-01")
    parser.add_argument("--lcb_to", help="contests up to this day")
    parser.add_argument("--sampler", default=default_kind(), choices=("vllm", "transformers"))
    parser.add_argument("--dtype", default="bfloat16" if default_gpu() else "float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lenient", action="store_true", help="mathematics: take an answer that is not in a box, too")
    parser.add_argument("--completions", help="grade this file instead of sampling: rows {benchmark, id, completion}")
    parser.add_argument("--allow_unsafe_code", action="store_true", help="run programs also where nothing isolates them")
    parser.add_argument("--out", default="eval", help="folder (eval)")
    args = parser.parse_args(argv)
    for name, least in (("samples", 1), ("max_prompt_tokens", 1), ("max_tokens", 1), ("limit", 0), ("seed", 0)):
        if getattr(args, name) is not None and getattr(args, name) < least:
            refuse(f"--{name} must be {least} or more, not {getattr(args, name)}")
    if not 0 < args.top_p <= 1:
        refuse(f"--top_p must be above 0 and at most 1, not {args.top_p}")
    if not args.temperature >= 0:
        refuse(f"--temperature must be 0 or more, not {args.temperature}")
    try:
        args.k = [int(k) for k in args.k.split(",")] if args.k else None if args.completions else powers_of_two(args.samples)
    except ValueError:
        refuse(f"--k {args.k}: whole numbers with commas between")
    if args.k and (min(args.k) < 1 or max(args.k) > args.samples and not args.completions):
        refuse(f"--k {','.join(map(str, args.k))}: pass@k needs k samples of each problem, and --samples is {args.samples}")
    args.max_tokens = args.max_tokens or (8192 if args.model or args.completions else 16)
    names = args.benchmarks.split(",")
    for name in ("lcb_release", "lcb_from", "lcb_to"):
        if getattr(args, name) and ("livecodebench" not in names or args.data_dir and name == "lcb_release"):
            refuse(f"--{name} is for livecodebench{' from the Hub' if name == 'lcb_release' else ''} alone")
    return args


def default_gpu():
    import torch
    return torch.cuda.is_available()


def load(args):
    """-> {benchmark: problems}"""
    try:
        sets = {name: data.load(name, args.split, args.data_dir, lcb_release=args.lcb_release, lcb_from=args.lcb_from, lcb_to=args.lcb_to)
                for name in dict.fromkeys(args.benchmarks.split(","))}
    except data.DataError as e:
        refuse(str(e))
    sets = {name: list(problems[:args.limit] if args.limit else problems) for name, problems in sets.items()}
    try:
        sandbox.prepare([p for problems in sets.values() for p in problems], args.allow_unsafe_code)
    except PermissionError as e:
        refuse(str(e))
    if args.lenient:
        sets = {name: [dict(p, reward="lenient_math") if p["reward"] == "math" else p for p in problems] for name, problems in sets.items()}
    return sets


def resume(path):
    """Rows of a completions.jsonl, cut back to its last whole chunk."""
    rows, whole = [], 0
    if path.exists():
        lines = path.read_bytes().splitlines(keepends=True)
        for i, line in enumerate(lines):
            if line == b"\n":  # a chunk ends with an empty line
                whole = i + 1
        rows = [json.loads(line) for line in lines[:whole] if line != b"\n"]
        with open(path, "r+b") as file:
            file.truncate(sum(map(len, lines[:whole])))
    return rows


def run(args, sets, path):
    """Samples and grades what completions.jsonl does not hold yet, chunk by chunk."""
    done = Counter(row["benchmark"] for row in resume(path))
    left = {name: problems[done[name] // args.samples:] for name, problems in sets.items()}
    if not any(left.values()):
        return
    import torch  # noqa: F401  (loading takes seconds: not for a refusal)
    from tqdm import tqdm
    from transformers import AutoTokenizer
    if not args.model:
        from data import tiny
        args.model = tiny.base_model()
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        eos = eos_ids(args.model, tokenizer)
    except (OSError, ValueError) as e:
        refuse(f"--model {args.model} cannot be loaded: {str(e).splitlines()[0]}")
    sampler = make_sampler(args.sampler, args.model, dtype=args.dtype, eos=eos, memory=0.9, max_length=args.max_prompt_tokens + args.max_tokens)
    size = max(1, CHUNK // args.samples)
    with open(path, "a") as file, tqdm(total=sum(map(len, left.values())), unit="problem") as bar:
        for name, problems in sets.items():
            for start in range(done[name] // args.samples, len(problems), size):
                chunk = problems[start:start + size]
                groups, _ = sample(sampler, tokenizer, chunk, args.samples, seed=seed_of("eval.py", args.seed, name, start),
                                   temperature=args.temperature, max_tokens=args.max_tokens, top_p=args.top_p, template=args.template)
                file.write("".join(json.dumps(dict(benchmark=name, id=p["id"], **row)) + "\n" for p, rows in zip(chunk, groups) for row in rows) + "\n")
                file.flush()
                os.fsync(file.fileno())
                bar.update(len(chunk))
    sampler.close()


def grade_again(args, sets, path):
    """--completions: the rows of a file, graded. Nothing is written before all of it is."""
    given, lines = defaultdict(list), []
    try:
        with open(args.completions, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    row = json.loads(line)
                    given[row["benchmark"], str(row["id"])].append(dict(row, completion=row["completion"] + ""))
    except OSError as e:
        refuse(f"--completions {args.completions} cannot be read: {e.strerror}")
    except (ValueError, KeyError, TypeError) as e:
        refuse(f"{args.completions}, line {number}: a row is {{benchmark, id, completion}}; {type(e).__name__}: {e}")
    for name, problems in sets.items():
        missing = [p["id"] for p in problems if (name, p["id"]) not in given]
        if missing:
            refuse(f"{args.completions} has no completion for {len(missing)} of {name}'s {len(problems)} problems (id {missing[0]})")
        groups = [given[name, p["id"]] for p in problems]
        if len(set(map(len, groups))) > 1:
            refuse(f"{args.completions} has different numbers of completions for the problems of {name}")
        if args.k and max(args.k) > len(groups[0]):
            refuse(f"--k {max(args.k)}: {args.completions} has {len(groups[0])} completions of each problem of {name}")
        rewards, _ = grade(problems, [[row["completion"] for row in group] for group in groups])
        lines += [json.dumps({**row, "tokens": row.get("tokens") or 0, "truncated": bool(row.get("truncated")), "score": score})
                  for group, scores in zip(groups, rewards) for row, score in zip(group, scores)] + [""]
    write(path, "\n".join(lines) + "\n")


def write(path, text):
    """In one piece: whoever reads finds the old or the new."""
    aside = path.with_suffix(".unfinished")
    aside.write_text(text, encoding="utf-8")
    aside.replace(path)


def report(args, sets, path, out):
    """eval.json, eval.md, passk.png from completions.jsonl; the table on the console."""
    groups = defaultdict(lambda: defaultdict(list))
    for line in path.read_text().splitlines():
        if line:
            row = json.loads(line)
            groups[row["benchmark"]][str(row["id"])].append(row)
    results = {}
    for name, problems in sets.items():
        by_problem = [groups[name][str(p["id"])] for p in problems]
        n = len(by_problem[0])
        args.k = args.k or powers_of_two(n)
        accuracy = [mean(row["score"] == 1 for row in rows) for rows in by_problem]
        low, high = interval(accuracy)
        spread = (sum((a - mean(accuracy)) ** 2 for a in accuracy) / max(1, len(accuracy) - 1) / len(accuracy)) ** 0.5
        results[name] = dict(summarise(by_problem, args.k), problems=len(problems), samples=n, standard_error=spread, interval=[low, high],
                             **({f"maj@{n}": mean(majority([vote(row["completion"]) for row in rows], [row["score"] for row in rows])
                                                  for rows in by_problem)} if problems[0]["reward"] in ("math", "lenient_math", "table") else {}))
    lines = ["| benchmark | problems | mean@n | 95% interval | " + " | ".join(f"pass@{k}" for k in args.k) + " | maj@n | truncated | length |",
             "|---" * (7 + len(args.k)) + "|"]
    for name, r in results.items():
        n = r["samples"]
        lines.append(f"| {name} | {r['problems']} | {r[f'mean@{n}']:.3f} (n={n}, se {r['standard_error']:.3f}) | {r['interval'][0]:.3f}-{r['interval'][1]:.3f} | "
                     + " | ".join(f"{r[f'pass@{k}']:.3f}" for k in args.k) + f" | {f'{maj:.3f}' if (maj := r.get(f'maj@{n}')) is not None else '-'} | {r['truncated_frac']:.3f} | {r['mean_length']:.0f} |")
    write(out / "eval.md", "\n".join(lines) + "\n")
    import figures
    from log import versions
    write(out / "eval.json", json.dumps(dict(settings=vars(args), versions=versions(), results=results), indent=1))
    figures.passk({name: {k: r[f"pass@{k}"] for k in args.k} for name, r in results.items()}, out / "passk.png")
    print("\n".join(lines))


def main(argv=None):
    args = parse_args(argv)
    sets, out = load(args), Path(args.out)
    path, before = out / "completions.jsonl", out / "settings.json"
    settings = {k: v for k, v in vars(args).items() if k != "out"}
    try:
        out.mkdir(parents=True, exist_ok=True)
        was = json.loads(before.read_text()) if before.exists() and path.exists() else settings
        if differ := [k for k in settings if settings[k] != was.get(k)]:
            refuse(f"--out {out} holds an evaluation with other settings ({', '.join(differ)}): give another folder")
        write(before, json.dumps(settings, indent=1))
    except OSError as e:
        refuse(f"--out {out} cannot be written: {e.strerror}")
    if args.completions:
        grade_again(args, sets, path)
    else:
        run(args, sets, path)
    report(args, sets, path, out)


if __name__ == "__main__":
    main()
