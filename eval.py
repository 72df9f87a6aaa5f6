"""Evaluation of a Hugging Face model on data's problems: mean@n, unbiased pass@k, maj@n, errors.

    python eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmarks aime24,amc23 --out evals/qwen
    python eval.py --completions FILE.jsonl --benchmarks aime24,amc23 --out evals/again

The second command grades completions that a file holds. A command that was cut off continues when
it is started again. The flags stand in experiment/eval_flags.py, reading and writing completions in
experiment/completions.py. train.py's --eval_every uses `sample_rows` and `summarise`, too.
"""

import itertools
from collections import Counter
from functools import partial
from pathlib import Path

import torch

import data
from data.recipe import BASE
from engine import parallel
from engine.completion import seed_of
from engine.sampler import make_sampler
from experiment import completions, eval_flags
from experiment.eval_flags import refuse
from experiment.stats import interval, mean, pass_at_k, powers_of_two, standard_error
from graders import sandbox
from rewards import Unparsed, final_answer, grade

# completions of an engine that are sampled, graded and written at once. A GPU gets many: it waits
# for the longest of them
CHUNK = 16384 if torch.cuda.is_available() else 1024
parse_args = partial(eval_flags.parse, description=__doc__)


def majority(answers, rewards):
    """maj@n of one problem: the reward of the most frequent answer; where several are equally
    frequent, the mean of theirs. None among the answers votes for nothing."""
    reward_of = dict(zip(answers, rewards, strict=True))
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    return mean(reward_of[answer] for answer, count in votes.items() if count == most)


def vote(completion):
    """The answer that a completion votes for in maj@n, None where it has none.

    Numbers vote by their value, so that 0.5 and 1/2 are one answer."""
    from graders.math_equal import clean, number, tight  # imports sympy, which takes a second
    try:
        text, _ = clean(final_answer(completion))
    except Unparsed:
        return None
    return tight(text) if number(text) is None else number(text)


def sample_rows(sampler, tokenizer, problems, samples, *, seed, temperature, max_tokens,
                top_p=1.0, template=None):
    """-> for each problem its completions as rows {completion, score, tokens, truncated}, and the
    grader's counters."""
    prompts = [data.encode(tokenizer, problem, template) for problem in problems]
    groups = sampler.sample(prompts, samples, seed=seed, temperature=temperature,
                            max_tokens=max_tokens, top_p=top_p)
    texts = [[data.decode(tokenizer, completion, prompt) for completion in group]
             for prompt, group in zip(prompts, groups, strict=True)]
    rewards, counters = grade(problems, texts)
    rows = [[dict(completion=text, score=reward, tokens=len(completion.tokens),
                  truncated=completion.truncated)
             for text, reward, completion in zip(*columns, strict=True)]
            for columns in zip(texts, rewards, groups, strict=True)]
    return rows, counters


def summarise(groups, ks):
    """groups: for each problem its rows. -> {mean@n, pass@k, both with _stderr for their standard
    error over the problems, reward (its mean), truncated_frac, mean_length}. A reward of 1 is a
    right completion, and any other a wrong one."""
    n = len(groups[0])
    correct = [sum(row["score"] == 1 for row in rows) for rows in groups]
    of_problems = {f"mean@{n}": [c / n for c in correct],
                   **{f"pass@{k}": [pass_at_k(n, c, k) for c in correct] for k in ks}}
    return {
        **{name: mean(values) for name, values in of_problems.items()},
        **{f"{name}_stderr": standard_error(values) for name, values in of_problems.items()},
        "reward": mean(row["score"] for rows in groups for row in rows),
        "truncated_frac": mean(row["truncated"] for rows in groups for row in rows),
        "mean_length": mean(row["tokens"] for rows in groups for row in rows),
    }


def benchmark_results(problems, groups, ks):
    """The numbers of a benchmark in eval.json. groups: for each problem its rows."""
    n, results = len(groups[0]), summarise(groups, ks)
    accuracies = [mean(row["score"] == 1 for row in rows) for rows in groups]
    results.update(problems=len(problems), samples=n, interval=list(interval(accuracies)),
                   standard_error=results[f"mean@{n}_stderr"])
    if problems[0]["reward"] in ("math", "lenient_math", "table"):
        results[f"maj@{n}"] = mean(
            majority([vote(row["completion"]) for row in rows], [row["score"] for row in rows])
            for rows in groups)
    return results


# ---------------------------------------------------------------------------- the command

def load_benchmarks(args):
    """-> {benchmark: problems}"""
    sets = {}
    for name in dict.fromkeys(args.benchmarks.split(",")):
        try:
            problems = data.load(name, args.split, args.data_dir, lcb_release=args.lcb_release,
                                 lcb_from=args.lcb_from, lcb_to=args.lcb_to)
        except data.DataError as e:
            refuse(str(e).replace("--data ", "--benchmarks ", 1))  # train.py's name of the flag
        sets[name] = list(itertools.islice(problems, args.limit or None))
    try:
        sandbox.prepare(list(itertools.chain(*sets.values())), args.allow_unsafe_code)
    except PermissionError as e:
        refuse(str(e))
    if args.lenient:
        for problem in itertools.chain(*sets.values()):
            if problem["reward"] == "math":
                problem["reward"] = "lenient_math"
    return sets


def load_model(args, sets):
    """-> the sampler and the tokenizer of --model"""
    if not args.model:
        args.model = BASE
    tokenizer, eos = eval_flags.load_tokenizer(args, sets)
    parallel.say(eval_flags.in_force(args))
    try:
        sampler = make_sampler(args.sampler, args.model, dtype=args.dtype, eos=eos, memory=0.9,
                               max_length=args.max_prompt_tokens + args.max_tokens)
    except Exception as e:  # there is no end to what can be wrong with weights
        refuse(f"--model {args.model} cannot be loaded: {data.hub.reason(e)}")
    return sampler, tokenizer


def sample_rest(args, sets, path):
    """Samples and grades what completions.jsonl does not hold yet, chunk by chunk. A chunk goes
    across benchmarks: engines wait for its longest completion, and not at each benchmark's end.
    Under torchrun every rank has an engine, and takes its share of each chunk."""
    left = parallel.on_rank0(partial(completions.resume, path, sets, args.samples))
    if not left:
        return
    from tqdm import tqdm
    sampler, tokenizer = load_model(args, sets)
    size = max(1, CHUNK * parallel.world() // args.samples)
    with tqdm(total=len(left), unit="problem", disable=parallel.rank() > 0) as bar:
        for start in range(0, len(left), size):
            chunk = left[start:start + size]

            def rows_of(share, engine):
                rows, _ = sample_rows(
                    sampler, tokenizer, [sets[name][i] for name, i in share], args.samples,
                    template=args.template, seed=seed_of("eval.py", args.seed, *chunk[0], engine),
                    temperature=args.temperature, top_p=args.top_p, max_tokens=args.max_tokens)
                return rows
            groups = parallel.map_over_engines(rows_of, chunk)
            parallel.on_rank0(partial(completions.append_chunk, path, [
                dict(benchmark=name, id=sets[name][i]["id"], **row)
                for (name, i), rows in zip(chunk, groups, strict=True) for row in rows]))
            bar.update(len(chunk))
    sampler.close()


def grade_file(args, sets, path):
    """Grades the rows of --completions. Nothing is written before all of them are graded."""
    graded = []
    given = completions.given_groups(args.completions, sets, args.k)
    for name, groups in given.items():
        texts = [[row["completion"] for row in rows] for rows in groups]
        rewards, _ = grade(sets[name], texts)
        for rows, scores in zip(groups, rewards, strict=True):
            for row, score in zip(rows, scores, strict=True):
                graded.append(dict(row, tokens=row.get("tokens") or 0,
                                   truncated=bool(row.get("truncated")), score=score))
    completions.write_whole(path, graded)


def report(args, sets, path, out):
    """Writes eval.json, eval.md and passk.png from completions.jsonl, and prints the table."""
    from experiment.report import write_report
    groups = completions.rows_by_problem(path, sets, args.samples)
    args.k = args.k or powers_of_two(min(len(group[0]) for group in groups.values()))
    results = {name: benchmark_results(sets[name], groups[name], args.k) for name in sets}
    write_report(out, vars(args), results, args.k)


def main(argv=None):
    args = parse_args(argv)
    sets, out = load_benchmarks(args), Path(args.out)
    path = out / "completions.jsonl"
    parallel.start()
    parallel.on_rank0(partial(completions.claim_folder, out, vars(args), sets))
    if args.completions:
        parallel.on_rank0(partial(grade_file, args, sets, path))
    else:
        sample_rest(args, sets, path)
    if parallel.rank() == 0:  # vLLM has taken the process group with it
        report(args, sets, path, out)
    parallel.stop()


if __name__ == "__main__":
    eval_flags.run(main)
