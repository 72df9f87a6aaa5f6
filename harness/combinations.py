"""Combinations of flags that cannot work: each is a sentence and exit code 2."""

import os
from functools import partial

import losses
from data import prompts
from engine import parallel
from engine.sampler import has_vllm
from harness import failures, method_check
from harness.files import default_out, folder_fault

refuse, refusing = (partial(f, "train.py") for f in (failures.refuse, failures.refusing))

GIVEN = "given"  # the origin of a flag of the command line
# flags that say something of another flag
NEEDS = dict(force="resume", lora_alpha="lora_rank", kl_unbiased="kl_coef")


def check(args, method, rehearsal):
    prompts.template_kwargs(args.template_kwargs, args.template)
    with refusing(f"{args.loss}: "):
        method_check.check(method, args.group_size, shaped=bool(args.overlong_penalty),
                           reference=args.kl_coef)
    if sentence := parallel.unusable_gpu() or folder_fault(args.model):
        refuse(sentence)
    for wrong, sentence in combinations(args, method, rehearsal):
        if wrong:
            refuse(sentence)


def combinations(args, method, rehearsal):
    """-> (is it wrong?, the sentence) of combinations of flags, and of folders."""
    ranks, vllm, steps = parallel.world(), args.sampler == "vllm", args.steps_per_rollout
    problems, G, engines = args.problems_per_rollout, args.group_size, ranks // args.tp
    dealt = problems if args.shuffle == "groups" else problems * G
    out, begins_anew = default_out(args), not (args.resume or args.check or rehearsal)
    return [
        (args.out and begins_anew and (out / "metrics.jsonl").exists(),
         f"--out {out} already holds a run, which --resume continues; give another"),
        *[(args.origin.get(name) == GIVEN and not getattr(args, other),
           f"--{name} is for --{other}, which is not given") for name, other in NEEDS.items()],
        (args.offload and "RANK" not in os.environ,
         "--offload is FSDP's: start with torchrun --nproc_per_node 1 train.py ..."),
        (not vllm and (args.tp > 1 or args.max_num_seqs
                       or args.origin.get("gpu_memory_utilization") == GIVEN),
         "--tp, --max_num_seqs and --gpu_memory_utilization are for --sampler vllm"),
        (vllm and args.sampler_dtype == "float8",
         "--sampler_dtype float8 is for --sampler transformers"),
        (vllm and not has_vllm() and not rehearsal,
         "--sampler vllm: vllm is not installed here; --sampler transformers needs nothing more"),
        (ranks % args.tp, f"--tp {args.tp} does not divide the number of ranks, {ranks}"),
        (engines > problems,
         f"--problems_per_rollout must be at least the number of engines, {engines}"),
        (args.check and args.resume, "--check starts a run anew: it goes without --resume"),
        (dealt % steps, f"{problems} problems x {G} completions: {dealt} {args.shuffle} do not "
         f"divide into --steps_per_rollout {steps}"),
        (args.overlong_penalty > args.max_tokens,
         f"--overlong_penalty must be at most --max_tokens, {args.max_tokens}"),
        (args.overlong_penalty and method.advantage is losses.maxrl,
         "maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0"),
        (method.advantage is losses.none and not args.teacher,
         "the advantage none learns from a teacher alone: --teacher MODEL"),
        ({*losses.CORRECTIONS} & {*method.selects} and args.old_logprobs == "sampler",
         f"--select {args.select} corrects for the sampler a second time: --old_logprobs sampler "
         "is already its own")]
