"""Evaluation of a Hugging Face model on data's problems: mean@n, unbiased pass@k, maj@n, errors.

    python eval.py --model Qwen/Qwen2.5-1.5B-Instruct --benchmarks aime24,amc23 --out evals/qwen
    python eval.py --completions FILE.jsonl --benchmarks aime24,amc23 --out evals/again
    python eval.py ... --out evals/qwen --against evals/base

The second command grades the completions of a file. The third compares with an evaluation of the
same problems, and loads no model if evals/qwen is complete. A command that was cut off continues
when it is started again.
"""

import argparse
import json
import os
import sys
from datetime import date
from functools import partial
from itertools import groupby, islice
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as train.py, before torch is imported
import data
from engine import parallel
from engine.sampler import make_sampler
from harness import failures, files, flags
from harness.files import append, folder_fault, lock, read_groups, write
from harness.log import versions
from harness.start import read_tokenizer
from harness.stats import benchmark_results, differences_table, paired, results_table
from rewards import announce
from rollout import sample_on_engines

# completions of an engine in a chunk: a GPU gets many, because it waits for the longest of them
AT_ONCE = 16384 if parallel.cuda.is_available() else 1024
SAMPLING = ("model samples temperature top_p max_tokens max_prompt_tokens template "
            "template_kwargs stop sampler dtype head_dtype seed").split()
NOT_OF_COMPLETIONS = {"out", "against", "allow_unsafe_code", "origin"}  # on which none depends
refuse = partial(failures.refuse, program="eval.py")  # one sentence, exit code 2


def day(text):
    try:
        return str(date.fromisoformat(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day, such as 2024-08-01") from None


def add_flags(flag):
    flag("model", data.BASE, "Hugging Face folder or id; the default is the embedded base")
    flag("benchmarks", "countdown", f"{', '.join(data.NAMES)}, or files.jsonl of "
         "{prompt, answer, verifier} rows, with commas between")
    flag("split", "test", "the part of a set; a file is both", choices=("train", "test"))
    flag("limit", 0, "only the first problems of each benchmark; 0 is all of them")
    flag("samples", 16, "completions of each problem, n", least=1)
    flag("temperature", 1.0, "temperature of the sampler; 0 is greedy")
    flag("top_p", 1.0, "sample from the most probable tokens, up to this probability in sum",
         least=1e-6, below=1.0000000000000002)  # the next number after 1
    flag("max_tokens", 8192, "the longest completion, in tokens", least=1)
    flag("max_prompt_tokens", 2048, "the longest prompt, in tokens", least=1)
    flag("lcb_from", None, "LiveCodeBench's contests from this day on, as 2024-08-01", type=day)
    flag("lcb_to", None, "LiveCodeBench's contests up to this day", type=day)
    flag("completions", None, "grade this file of {benchmark, id, completion} rows; no sampling")
    flag("against", None, "folder of another evaluation of these problems: prints the differences")
    flag("out", "eval", "the folder for the results")
    flags.add_common_flags(flag)


@failures.refusing(program="eval.py")
def parse_args(argv=None):
    parser = flags.Parser("eval.py", usage="eval.py [--FLAG VALUE ...]", description=__doc__)
    add_flags(parser.flag)
    parser.add_argument("-h", "--help", action="store_true",
                        help="show this page, with --model's defaults")
    given = vars(parser.parse_args(argv))
    settings = flags.settings_of(given.get("model"))
    recipe = "the model's recipe.json", {name: settings.get(name) for name in flags.OF_A_CHECKPOINT}
    if "help" in given:
        parser.show_help(parser.merge({}, recipe))
    args = parser.merge(given, recipe)
    names = [*map(str.strip, args.benchmarks.split(","))]
    args.head_dtype = args.head_dtype or ("model" if args.dtype == "float32" else "float32")
    flags.check_data_dir(args, *names)
    if (args.lcb_from or args.lcb_to) and "livecodebench" not in names:
        refuse("--lcb_from and --lcb_to are for livecodebench alone")
    if 0 < args.temperature < 0.01:  # which vLLM would raise to 0.01
        refuse(f"--temperature must be 0 (greedy) or at least 0.01, not {args.temperature}")
    if args.completions:
        if unused := given.keys() & SAMPLING:
            refuse(f"--{min(unused)} is for sampling, and --completions samples nothing")
        vars(args).update(dict.fromkeys(SAMPLING))  # None from here on
    elif sentence := parallel.unusable_gpu() or folder_fault(args.model):
        refuse(sentence)
    return args


def load_benchmarks(args):
    """-> the problems of all benchmarks, each with its `benchmark` and its `number` there."""
    problems = []
    try:
        for name in dict.fromkeys(map(str.strip, args.benchmarks.split(","))):
            rows = data.load(name, args.split, args.data_dir, lcb_from=args.lcb_from,
                             lcb_to=args.lcb_to)
            problems += [dict(row, benchmark=name, number=number)
                         for number, row in enumerate(islice(rows, args.limit or None))]
        announce(problems, args.allow_unsafe_code)
    except (data.DataError, PermissionError) as e:
        refuse(str(e).replace("--data ", "--benchmarks ", 1))  # train.py's name of the flag
    return problems


def load_model(args, problems):
    """-> the sampler and the tokenizer of --model"""
    with failures.refusing(program="eval.py"):
        tokenizer, eos, lengths = read_tokenizer(
            args.model, problems, args.template, args.template_kwargs,
            args.max_prompt_tokens + args.max_tokens)
    if (longest := max(lengths)) > args.max_prompt_tokens:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens}: the prompt of problem "
               f"{problems[lengths.index(longest)]['id']} has {longest} tokens, and a benchmark's "
               "score is of all its problems")
    settings = flags.with_origins(args, "sampler dtype temperature max_tokens template stop")
    parallel.say(f"model {args.model}: {settings}")
    try:
        return make_sampler(args.sampler, args.model, dtype=args.dtype, eos=eos,
                            max_length=args.max_prompt_tokens + args.max_tokens, stop=args.stop,
                            head_dtype=args.head_dtype, gpu_memory_utilization=None), tokenizer
    except Exception as e:  # damaged weights may raise anything
        refuse(f"--model {args.model}: --sampler {args.sampler} cannot load it: "
               f"{data.sources.reason(e)}")


def claim(args, problems, out):
    """Makes and locks the folder, and keeps its settings. Refuses one of other settings."""
    settings = {name: value for name, value in vars(args).items() if name not in NOT_OF_COMPLETIONS}
    checksums = {"weights of --model": args.model and files.checksum_of_weights(args.model),
                 "problems": files.checksum_of_problems(problems)}
    content, path, file = settings | checksums, out / "settings.json", out / "completions.jsonl"
    try:
        lock(out)
        if not file.exists() or not file.stat().st_size:
            write(path, json.dumps(content, indent=1))
        before = json.loads(path.read_text())
        for name, value in content.items():
            then = before.get(name)
            if value != then and (name in settings or None not in (value, then)):  # None: unknown
                refuse(f"--out {out} was begun with {name} {then}, not {value}; give another")
    except BlockingIOError:
        refuse(f"--out {out} is another process's at this moment")
    except Exception as e:  # settings.json may hold anything
        refuse(f"--out {out} cannot be used: {e}")


def previous_rows(args, problems, out, size):
    """Grades the rows again that the folder or --completions has of the first problems, and keeps
    whole chunks, of `size` problems: one with fewer is sampled anew. -> them, --against's or None
    """
    path = out / "completions.jsonl"
    groups = read_groups(Path(args.completions or path), problems, args.samples,
                         args.completions and "--completions", size)
    write(path, "".join(json.dumps(row) + "\n" for rows in groups for row in rows))
    return groups, args.against and read_groups(
        Path(args.against, "completions.jsonl"), problems, args.samples or len(groups[0]),
        "--against")  # samples is None with --completions


def sample_rest(args, problems, groups, path, size):
    """Adds the rows of the other problems to groups. A chunk has problems of several benchmarks,
    because engines wait for its longest completion; each rank's engine samples a share of it."""
    from tqdm import tqdm
    sampler, tokenizer = load_model(args, problems)
    for start in tqdm(range(len(groups), len(problems), size), disable=parallel.rank() > 0):
        first, *_ = chunk = problems[start:start + size]
        seed = "eval.py", args.seed, first["benchmark"], first["number"]
        sampled = sample_on_engines(
            sampler, tokenizer, chunk, args.template, seed, n=args.samples, top_p=args.top_p,
            temperature=args.temperature, max_tokens=args.max_tokens)
        rows = [[dict(benchmark=group.problem["benchmark"], id=group.problem["id"], **row)
                 for row in group.rows()] for group in sampled]
        parallel.on_rank0(append, path, sum(rows, []))
        groups += rows
    sampler.close()


def report(args, problems, groups, others, out):
    """Prints the tables and writes eval.json and eval.md. others: rows of --against, or None."""
    results, differences = {}, {}
    for name, its in groupby(zip(problems, groups, others or groups), lambda x: x[0]["benchmark"]):
        of_benchmark, ours, theirs = zip(*its)
        results[name] = benchmark_results(of_benchmark, ours)
        if others:
            differences[name] = paired(of_benchmark, ours, theirs)
    content = dict(settings=vars(args), versions=versions(), results=results)
    table = results_table(results)
    if others:
        content["against"] = differences
        path = Path(args.against, "settings.json")  # its rows may be from elsewhere
        there = json.loads(path.read_text()) if path.is_file() else {}
        other = "".join(f"; {name} {x}, there {there[name]}" for name, x in vars(args).items()
                        if None not in (x, there.get(name)) and x != there[name])
        table += f"\n\nagainst {args.against}{other}:\n\n{differences_table(differences)}"
    write(out / "eval.md", table + "\n")
    write(out / "eval.json", json.dumps(content, indent=1))
    print(table)


def main(argv=None):
    args = parse_args(argv)
    try:
        problems, out = load_benchmarks(args), Path(args.out)
        parallel.start()
        size = max(1, AT_ONCE * parallel.world() // (args.samples or 1))  # None: --completions
        parallel.on_rank0(claim, args, problems, out)
        groups, others = parallel.on_rank0(previous_rows, args, problems, out, size)
        if len(groups) < len(problems):
            with failures.room_for("sample", "fewer --max_tokens or --max_prompt_tokens"):
                sample_rest(args, problems, groups, out / "completions.jsonl", size)  # into groups
        parallel.on_rank0(report, args, problems, groups, others, out)
        parallel.stop()
    except (OSError, FloatingPointError, failures.RunFailed, KeyboardInterrupt) as e:
        print(f"eval.py: {str(e) or 'interrupted'}; the same command continues", file=sys.stderr)
        sys.exit(130 if isinstance(e, KeyboardInterrupt) else 1)


if __name__ == "__main__":
    main()
