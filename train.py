"""RL with verifiable rewards: sample, grade, score, update, sync, log.

    python train.py --loss fade --steps_per_rollout 16        the embedded base, on a laptop
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data countdown34 --loss acpo
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-7B --data orz --eval_data math500

The method is a row of losses.METHODS; its functions' keyword-only arguments are flags here, and
`--loss NAME --help` lists them. The loop is `main`, at the end; one optimizer step is
`Trainer.step` in engine/trainer.py.
"""

import os
import sys

os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # a thread that waits soon leaves its core
import torch

import data
from engine import parallel
from engine.policy import compute_logprobs, make_batch, minibatches
from harness import checkpoint, log
from harness.failures import RunFailed, refusing
from harness.flags import parse_args
from harness.start import load_data, load_sampler, load_tokenizer, load_trainer
from harness.stats import summarise
from losses import group_advantages
from rollout import sample_on_engines

REFILLS = 4  # draws at most, besides the first, for groups whose rewards differ

# ----------------------------------------------------------- sample and grade; score: log pi

def sample_and_grade(sampler, tokenizer, train_set, args, rollout, timed):
    """-> P groups to learn from, and all; those of several rewards first. rollout: from 1.

    With --drop_uniform_groups (DAPO's dynamic sampling) uniform groups, of one reward, are replaced
    by a new draw, up to REFILLS times. If there are still too few, uniform groups fill the
    batch up to its size."""
    mixed, uniform = [], []
    for attempt in range(1 + REFILLS * args.drop_uniform_groups):
        problems = data.batch(train_set, args.problems_per_rollout, args.seed, rollout, attempt)
        seed = args.seed, rollout - 1, attempt  # from 0, as attempts do
        for group in sample_on_engines(
                sampler, tokenizer, problems, args.template, seed, args.tp, timed,
                n=args.group_size, temperature=args.sampler_temperature,
                max_tokens=args.max_tokens):
            (mixed if len(set(group.rewards)) > 1 else uniform).append(group)
        if len(mixed) >= args.problems_per_rollout:
            break
    groups = mixed + uniform
    return groups[:args.problems_per_rollout], groups


def score(trainer, groups, args):
    """-> the Batch of the groups' completions, with the present weights' entropies, log pi_old, log
    pi of reference and teacher; and metrics: entropy, gaps to the sampler and to the teacher."""
    batch = make_batch([(group.prompt, group.completions) for group in groups], parallel.device())
    logprobs, batch.entropy = compute_logprobs(trainer.policy, batch)
    metrics = log.sampler_gap(logprobs, batch)
    # by default Method.old_logprobs; with a lag scored_rollouts replaces those of "proximal"
    batch.old_logprobs = batch.sampler_logprobs if args.old_logprobs == "sampler" else logprobs
    if trainer.reference:
        batch.ref_logprobs, _ = compute_logprobs(trainer.reference, batch)
    if trainer.teacher:
        batch.teacher_logprobs, _ = compute_logprobs(trainer.teacher, batch)
        gap = batch.old_logprobs - batch.teacher_logprobs
        metrics["policy/kl_teacher"] = gap[batch.mask].mean().item()
    metrics["policy/entropy"] = batch.entropy[batch.mask].mean().item()
    if args.mask_truncated:
        truncated = [c.truncated for group in groups for c in group.completions]
        batch.mask &= ~torch.tensor(truncated, device=parallel.device())[:, None]
    return batch, metrics


def scored_rollouts(run, trainer, sampler, tokenizer, train_set, args):
    """Yields what to learn from, once a rollout: the Batch of P groups of G completions, group by
    group; their rewards [P, G] as graded; metrics to log; and examples for samples.jsonl.

    With --rollout_lag N, N later rollouts are sampled before one is yielded. They wait in
    run.pending, with the log probabilities of the weights that sampled them."""
    for _ in run.rollouts():
        sampled = [sample_and_grade(sampler, tokenizer, train_set, args, rollout, run.timed)
                   for rollout in run.to_sample()]  # none while enough are pending
        sampler.sleep()
        for groups, all_groups in sampled:
            with run.timed("logp"):
                batch, metrics = score(trainer, groups, args)
            rewards = torch.tensor([group.rewards for group in groups], device=parallel.device())
            outcome = log.outcome(all_groups)  # also of those not learnt from
            run.sampled_tokens += outcome["len/sum"]
            run.pending.append((batch, rewards, {**outcome, **metrics},
                                log.examples(groups, tokenizer)))
        batch, rewards, metrics, examples = run.pending.pop(0)
        if args.old_logprobs == "proximal" and args.rollout_lag:  # older weights scored it
            with run.timed("logp"):
                present, _ = compute_logprobs(trainer.policy, batch)
            metrics["policy/kl_age"] = (batch.old_logprobs - present)[batch.mask].mean().item()
            batch.old_logprobs = present
        yield batch, rewards, metrics, examples


def shaped(rewards, batch, args):
    """The rewards [P, G] to learn from. With --overlong_penalty (DAPO, eq. 13) they fall linearly,
    by up to 1, over the last --overlong_penalty tokens before --max_tokens."""
    if not args.overlong_penalty:
        return rewards
    over = batch.completion_len - (args.max_tokens - args.overlong_penalty)
    return rewards - (over / args.overlong_penalty).clamp(0, 1).view_as(rewards)


def evaluate(sampler, tokenizer, test_set, args):
    """-> {eval/<data>/<metric>: value} of the held-out problems, at the sampler's weights.

    All evaluations of a run have one seed: equal weights have equal scores."""
    groups = sample_on_engines(
        sampler, tokenizer, test_set, args.template, ("eval", args.seed), args.tp,
        n=args.eval_samples, temperature=args.temperature, max_tokens=args.max_tokens)
    scores = summarise(test_set, [group.rows() for group in groups])
    return {f"eval/{args.eval_data or args.data}/{name}": x for name, x in scores.items()}


# ---------------------------------------------------------------------------- the run

def main(argv=None):
    args, method = parse_args(argv, __doc__)
    parallel.start(args.deterministic)
    train_set, test_set, checksums = load_data(args)
    if checkpoint.finished(args):
        return parallel.stop()
    # ---- the trainer. These imports take seconds: flags and data were checked before
    from harness import check
    from harness.run import Run, banner
    tokenizer, eos, train_set, test_set = load_tokenizer(args, train_set, test_set)  # that fit
    trainer = load_trainer(args, method, tokenizer, eos, train_set[0])
    if args.check:
        parallel.say(banner(args, trainer, None, 0))
        sys.exit(check.run(args, trainer, load_sampler(args, trainer, eos), tokenizer, train_set))

    restored = checkpoint.restore(args, trainer)  # adapters, optimizer, numbers; None: a new run
    with Run(args, trainer, tokenizer, checksums, len(test_set), restored) as run:
        sampler = load_sampler(args, trainer, eos)
        if args.eval_every and not run.rollout:  # of a new run
            with run.timed("eval"):
                scores = evaluate(sampler, tokenizer, test_set, args)
            run.write(scores)

        # ---- sample P problems x G completions, grade them, score them: log pi of every token
        for batch, rewards, metrics, examples in scored_rollouts(
                run, trainer, sampler, tokenizer, train_set, args):
            # ---- advantages, group by group
            shaped_rewards = shaped(rewards, batch, args)
            metrics["reward/shaped"] = shaped_rewards.mean().item()
            run.state["entropy"] = metrics["policy/entropy"]  # which fade reads
            run.keep_rollout(batch, rewards, shaped_rewards)  # --save_rollouts
            with refusing():  # passk takes no partial rewards
                advantages = group_advantages(method, shaped_rewards, run.state)  # [P, G]
            batch.set_advantages(advantages)

            # ---- S optimizer steps (Trainer.step: policy.py's backward, AdamW), each on its share
            together = args.group_size if args.shuffle == "groups" else 1
            with run.timed("update"):
                steps = [trainer.step(minibatch) for _, minibatch in minibatches(
                    batch, method, args.steps_per_rollout, args.seed, run.rollout, together)]

            # ---- weights to the sampler, asleep since it sampled
            with run.timed("sync"):
                sampler.load_weights(trainer.weights(sampler.merged))

            # ---- evaluate, log, save
            if run.due(args.eval_every):
                with run.timed("eval"):
                    metrics.update(evaluate(sampler, tokenizer, test_set, args))
            run.log(batch, advantages, steps, metrics, examples)
            run.save()
        if not run.stopping:
            parallel.on_rank0(run.draw)

    sampler.close()
    parallel.stop()
    if run.stopping:
        sys.exit(128 + run.stopping[0])


if __name__ == "__main__":
    try:
        main()
    except (RunFailed, FloatingPointError, OSError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("train.py: interrupted; --resume continues from the last checkpoint, or starts again "
              "where there is none", file=sys.stderr)
        sys.exit(130)
