"""How far sampler and trainer are apart in 16 bits, with the LM head's logits in them and in
float32, and what an update then costs.

    python bench/head_dtype.py                          the gap, on the embedded base and a random
                                                        model of 4 layers and 151,936 tokens
    python bench/head_dtype.py --seconds                the seconds of an update, too
    python bench/head_dtype.py --sampler vllm --dtype float16

gap_mean and gap_max are the log's sampler/logp_absdiff_mean and _max of one rollout, in nats.
"""

import argparse
import json
import statistics
import tempfile

import gpu  # it puts the root into sys.path
import torch
from transformers.utils.logging import disable_progress_bar

from data import BASE
from engine import loading, parallel
from engine.policy import backward, compute_logprobs, make_batch
from engine.sampler import default_kind, make_sampler
from harness import log
from losses import METHODS
from study import tiny


def wide_model(folder, vocabulary):
    """Writes a random model of 4 layers, 512 wide, whose probabilities are far from uniform."""
    recipe = dict(tiny.RECIPE, hidden=512, mlp=1536, layers=4, heads=8, tied=True, seed=0)
    model = tiny.empty_model(recipe, vocabulary)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    model.save_pretrained(folder)
    return folder


def gap_of(policy, sampler, args):
    """-> the Batch of a rollout, and the log's numbers of the gap."""
    vocabulary = policy.model.config.vocab_size
    prompts = [gpu.random_ids(args.prompt, i, vocabulary) for i in range(args.problems)]
    groups = sampler.sample(prompts, args.group_size, seed=1, temperature=1.0,
                            max_tokens=args.max_tokens)
    batch = make_batch([*zip(prompts, groups)], parallel.device())
    logprobs, batch.entropy = compute_logprobs(policy, batch)
    told = log.sampler_gap(logprobs, batch)
    return batch, dict(gap_mean=told["sampler/logp_absdiff_mean"],
                       gap_max=told["sampler/logp_absdiff_max"], tokens=int(batch.mask.sum()))


def seconds_of(policy, batch, args):
    """The median time of an update's forward and backward passes."""
    batch.old_logprobs = batch.sampler_logprobs
    batch.advantages = batch.mask.float()
    times = [gpu.watched(backward, policy, batch, METHODS["reinforce"], args.max_tokens)["s"]
             for _ in range(6)]
    return statistics.median(times[1:])  # the first warms up


def measure(model, head_dtype, args):
    probe = loading.probe_batch([*range(5, 37)], 1)
    policy = loading.load(model, [1], probe, loading.Compute(
        dtype=args.dtype, head_dtype=head_dtype, budget=args.budget))
    sampler = make_sampler(args.sampler, model, dtype=args.dtype, eos=[1], head_dtype=head_dtype,
                           max_length=args.prompt + args.max_tokens, gpu_memory_utilization=0.3)
    batch, told = gap_of(policy, sampler, args)
    sampler.sleep()
    if args.seconds:
        told["seconds"] = seconds_of(policy, batch, args)
    sampler.close()
    return told


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--sampler", default=default_kind(), choices=("vllm", "transformers"))
    parser.add_argument("--seconds", action="store_true", help="time an update, too")
    for name, number in dict(vocabulary=151936, problems=16, group_size=8, prompt=16,
                             max_tokens=32, budget=4096).items():
        parser.add_argument(f"--{name}", type=int, default=number)
    args = parser.parse_args(argv)
    disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in (("base", BASE), ("wide", wide_model(folder, args.vocabulary))):
            for head_dtype in ("model", "float32"):
                told = measure(model, head_dtype, args)
                print(json.dumps(dict(model=name, head_dtype=head_dtype, dtype=args.dtype,
                                      sampler=args.sampler, **told)), flush=True)


if __name__ == "__main__":
    main()
