"""Does a run fit? Answered on a laptop, before a GPU is rented, from a model's config.json alone.

    python -m experiment.fit --model Qwen/Qwen2.5-7B --gpus 8 --gpu_memory 80 --max_tokens 3072

All other flags are train.py's, with the defaults that they have on such a GPU. The run is rehearsed
without weights (experiment/rehearsal.py). Exit code 0 where it fits, 1 where it does not, 2 where
flags or model cannot be used.
"""

import os
import sys
import time
from functools import partial
from unittest import mock

from engine import parallel
from experiment import cli, failures, room
from experiment.rehearsal import rehearse, torchrun
from experiment.shapes import config_of

GB = room.GB
SHARE = 0.95  # of a GPU; the rest is CUDA's, NCCL's, and between blocks
refuse = partial(failures.refuse, "experiment.fit")


class Parser(cli.Parser):
    def error(self, message):
        refuse(message)


def parse_args(argv):
    """-> fit's own flags, and those of argv that are train.py's."""
    parser = Parser(prog="experiment.fit", description=__doc__,
                    usage="python -m experiment.fit --model NAME [--gpus N] [--FLAG VALUE ...]",
                    epilog="and every flag of train.py: python train.py --help")
    parser.flag("gpus", 1, "GPUs, a process on each; 1 is without torchrun, but for --offload")
    parser.flag("gpu_memory", 80.0, "memory of one in GB, 1e9 bytes")
    parser.flag("prompt_tokens", None, "tokens of a prompt; default --max_prompt_tokens", type=int)
    parser.flag("completion_tokens", None, "tokens of a completion; default --max_tokens", type=int)
    parser.add_argument("-h", "--help", action="help", help="show this page")
    own, of_train = parser.parse_known_args(argv)
    for name, value in vars(own).items():
        if value is not None and not 1 <= value < 2**20:
            refuse(f"--{name} must be from 1 to a million, not {value}")
    return own, of_train


def parse_run(of_train):
    """train.parse_args, where the GPU has bfloat16 and vLLM is installed."""
    import train
    with mock.patch.object(parallel, "default_dtype", lambda: "bfloat16"), \
            mock.patch.object(train, "default_kind", lambda: "vllm"), \
            mock.patch.object(cli, "has_vllm", lambda: True):
        args, method = train.parse_args(of_train)
    if args.model is None:
        refuse("--model NAME is missing; the embedded base, of a million parameters, fits anywhere")
    return args, method


def lengths_of(own, args, config):
    """-> tokens of a prompt and of a completion."""
    lengths = own.prompt_tokens or args.max_prompt_tokens, own.completion_tokens or args.max_tokens
    if lengths[0] > args.max_prompt_tokens or lengths[1] > args.max_tokens:
        refuse(f"--prompt_tokens {lengths[0]} and --completion_tokens {lengths[1]} are typical "
               f"lengths: at most --max_prompt_tokens {args.max_prompt_tokens} and --max_tokens "
               f"{args.max_tokens}")
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    if positions and args.max_prompt_tokens + args.max_tokens > positions:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} and --max_tokens {args.max_tokens} "
               f"are more than the model's {positions} positions")
    return lengths


def phases_of(figures, args, memory):
    """-> {phase: (bytes of the trainer, bytes of the sampler)} on each GPU, at the most."""
    weights = figures.base * (4 if args.sampler_dtype == "float32" else 2) / args.tp
    vllm = args.sampler == "vllm"
    awake = args.gpu_memory_utilization * memory if vllm else weights
    asleep = 0 if vllm else weights
    return {"start": (figures.start, awake), "sampling": (figures.between, awake),
            "scoring": (figures.scoring[1][1], asleep), "update": (figures.update[1][1], asleep),
            "sync": (figures.sync, weights), "checkpoint": (figures.sync, awake)}


def advice(figures, args, phases, memory, gpus):
    """Yields what makes room where it is lacking. The first two follow from the figures; they are
    left out where weights, moments and gradients alone are too much."""
    state = figures.between + (0 if args.offload else 4 * figures.trained / gpus)
    if state > SHARE * memory:
        yield (f"weights, AdamW's moments and gradients alone take {state / GB:.1f} GB, so one of "
               "these: --lora_rank 16 (adapters, with ten times the learning rate), --offload "
               f"under torchrun, --gpus {2 * gpus}")
        return
    full = {name for name, parts in phases.items() if sum(parts) > SHARE * memory}
    computing = full & {"scoring", "update"} or figures.no_room
    largest = figures.largest(SHARE * memory - phases["update"][1])
    if computing and largest >= args.max_prompt_tokens + args.max_tokens:
        yield f"--tokens_per_micro_batch {largest} or less"
    trainer = max(phases[name][0] for name in ("start", "sampling", "checkpoint"))
    share = int(100 * (SHARE - trainer / memory)) / 100
    if full & {"start", "sampling", "checkpoint"} and args.sampler == "vllm" \
            and share * memory > 1.1 * phases["sync"][1]:  # as room.refusal has it
        yield f"--gpu_memory_utilization {share}"
    if computing and not args.activation_checkpointing:
        yield "--activation_checkpointing"
    if not args.lora_rank:
        yield "--lora_rank 16"
    if not args.offload:
        yield "--offload"
    yield f"--gpus {2 * gpus}"


def report(figures, args, own, lengths, phases):
    rows = args.problems_per_rollout * args.group_size // args.steps_per_rollout
    step = ", ".join(f"{n:,} {kind}s" for kind, n in figures.collectives.items()) or "none"
    found = "given" if args.origin.get("tokens_per_micro_batch") == "given" else "the run's choice"
    budget = f"none that the run would take, {figures.budget:,} for what follows" \
        if figures.no_room else f"{figures.budget:,} ({found})"
    usable, base = SHARE * own.gpu_memory * GB, 4 * figures.base / GB
    print(f"""\
model            {args.model}: {figures.parameters:,} parameters, {figures.trained:,} trained
GPUs             {own.gpus} of {own.gpu_memory:g} GB
rollout          {args.problems_per_rollout} prompts of {lengths[0]:,} tokens x {args.group_size} \
completions of {lengths[1]:,}
tokens at once   {budget}, {figures.layout}; \
{figures.largest(usable - phases['update'][1]):,} is about the most that fits
optimizer step   {rows} completions: {figures.step_tokens:,} tokens go through the model, \
{rows * sum(lengths):,} with every prompt repeated
                 {figures.parts} on each rank one after another, the largest of \
{figures.update[1][0]:,} tokens
collectives      {step}, in a step
host memory      {base * own.gpus:.1f} GB while every process loads the weights, \
{base + 8 * figures.trained / GB:.1f} GB on rank 0 for a checkpoint""")
    if args.offload:
        state = base + (12 * figures.trained + 4 * (figures.parameters - figures.base)) / GB
        print(f"                 {state:.1f} GB all the time, for --offload")
    print("\nGB of each GPU   trainer   sampler  together")
    for name, parts in phases.items():
        sizes = "".join(f"{x / GB:10.1f}" for x in (*parts, sum(parts)))
        print(f"{name:14}{sizes}{'' if sum(parts) <= usable else '  too much'}")


def main(argv=None):
    began = time.time()
    own, of_train = parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a rehearsal is on the CPU, also where there is a GPU
    with torchrun(own.gpus, "--offload" in of_train):
        args, method = parse_run(of_train)
        try:
            config = config_of(args.model)
        except ValueError as e:
            refuse(str(e))
        lengths, memory = lengths_of(own, args, config), own.gpu_memory * GB
        figures = rehearse(args, method, config, *lengths, memory)
        refused = figures.no_room or room.refusal(args, figures.base, memory, own.gpus,
                                                  "RANK" in os.environ)
    phases = phases_of(figures, args, memory)
    report(figures, args, own, lengths, phases)
    fits = not refused and all(sum(parts) <= SHARE * memory for parts in phases.values())
    print(f"\nIt fits: no phase takes more than {SHARE} of the memory." if fits else
          "\nIt does not fit. What makes room, to be rehearsed: "
          + "; ".join(advice(figures, args, phases, memory, own.gpus)))
    if refused:
        print(f"The run would be refused: {refused}")
    print("Not looked at, without weights: whether Policy's log probabilities are the model's, and "
          "whether the model allows for the layout. A run asks both at its start.")
    print(f"({time.time() - began:.0f} seconds, {parallel.peak_memory() / GB:.1f} GB of this "
          "machine's memory)")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
