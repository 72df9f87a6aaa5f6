"""eval.py's flags, and the sentences that refuse what cannot work. train.py's are in cli.py."""

import argparse
from functools import partial

import torch

import data
from engine.sampler import default_kind
from experiment import failures

refuse = partial(failures.refuse, "eval.py")


def add_flags(parser):
    flag = parser.add_argument
    flag("--model", help="Hugging Face folder or id; without it the embedded base")
    flag("--benchmarks", default="countdown",
         help=f"of {', '.join(data.names())}, or files, with commas between (countdown)")
    flag("--data_dir",
         help="a folder of local JSONL files, with the Hub's field names, instead of the Hub")
    flag("--split", default="test", help="train or test (test)")
    flag("--limit", type=int, default=0, help="only the first so many problems of each; 0 is all")
    flag("--samples", type=int, default=16, help="completions of each problem (16)")
    flag("--k", help="the k of pass@k, with commas between; default 1, 2, 4, ... up to --samples")
    flag("--temperature", type=float, default=1.0, help="of the sampler; 0 is greedy (1.0)")
    flag("--top_p", type=float, default=1.0, help="of the sampler; 1 keeps all tokens (1.0)")
    flag("--max_tokens", type=int,
         help="the longest completion; default 16 for the embedded base, else 8192")
    flag("--max_prompt_tokens", type=int, default=2048, help="the longest prompt (2048)")
    flag("--template", choices=data.TEMPLATES,
         help="how a problem becomes a prompt; default by task and model, see data/README.md")
    flag("--lcb_release", help="release_v1 ... release_v6 (release_v6), or v1 ... v6 for one file")
    flag("--lcb_from", help="LiveCodeBench's contests from this day on, such as 2024-08-01")
    flag("--lcb_to", help="LiveCodeBench's contests up to this day")
    flag("--sampler", default=default_kind(), choices=("vllm", "transformers"))
    flag("--dtype", default="bfloat16" if torch.cuda.is_available() else "float32",
         choices=("float32", "bfloat16"), help="of weights and computation")
    flag("--seed", type=int, default=0, help="of the sampler (0)")
    flag("--lenient", action="store_true",
         help="mathematics: accept an answer that is not in a box, too")
    flag("--completions", metavar="FILE",
         help="grade this file instead of sampling: rows {benchmark, id, completion}")
    flag("--allow_unsafe_code", action="store_true",
         help="run programs also where nothing isolates them")
    flag("--out", default="eval", help="the folder for the results (eval)")


def check_flags(args):
    least = dict(samples=1, max_prompt_tokens=1, max_tokens=1, limit=0, seed=0)
    for name, bound in least.items():
        value = getattr(args, name)
        if value is not None and value < bound:
            refuse(f"--{name} must be {bound} or more, not {value}")
    if not 0 < args.top_p <= 1:
        refuse(f"--top_p must be above 0 and at most 1, not {args.top_p}")
    if not args.temperature >= 0:  # unlike temperature < 0, this refuses nan, too
        refuse(f"--temperature must be 0 or more, not {args.temperature}")
    livecodebench = "livecodebench" in args.benchmarks.split(",")
    if args.lcb_release and (args.data_dir or not livecodebench):
        refuse("--lcb_release is for livecodebench from the Hub alone")
    for name in ("lcb_from", "lcb_to"):
        if getattr(args, name) and not livecodebench:
            refuse(f"--{name} is for livecodebench alone")


def parse(argv, description):
    parser = argparse.ArgumentParser(prog="eval.py", description=description, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = refuse  # without the page of usage in front of the sentence
    add_flags(parser)
    args = parser.parse_args(argv)
    check_flags(args)
    args.max_tokens = args.max_tokens or (8192 if args.model or args.completions else 16)
    return args
