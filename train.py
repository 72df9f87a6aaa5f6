"""RL with verifiable rewards: sample, grade, score, update, sync, log.

    python train.py --loss fade --steps_per_rollout 16        the embedded base, on a laptop
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data countdown34 --loss acpo
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-7B --data orz --eval_data math500

The method is a row of losses.METHODS; its functions' keyword-only arguments are flags here, and
`--loss NAME --help` lists them. The loop is `main`, at the end; one optimizer step is `update`.
"""

import sys
from collections import Counter
from typing import NamedTuple

import torch

import data
import losses
from data.recipe import BASE
from engine import parallel
from engine.policy import backward, compute_logprobs, make_batch, shuffled_shares
from engine.sampler import Completion, default_kind, make_sampler, seed_of
from eval import sample_rows, summarise
from experiment import cli, log
from experiment.failures import NotFinite, RunFailed
from experiment.stats import powers_of_two
from losses import METHODS, group_advantages
from rewards import grade

# ---------------------------------------------------------------------------- the flags

def add_flags(flag):
    """The flags that every method has: name, default, what it is. A switch that is on is switched
    off by --no-NAME."""
    kinds, dtypes = ("vllm", "transformers"), ("float32", "bfloat16", "float16")
    # method
    flag("loss", "grpo", "the method", choices=METHODS, metavar="NAME")
    for axis in losses.AXES:
        flag(axis, None, f"another {axis} than the method's: {', '.join(losses.cells(axis))}",
             metavar="NAME")
    # problem
    flag("model", None, "Hugging Face folder or id; without it the embedded base, with "
         "settings of its own")
    flag("data", "countdown", f"the problems: {', '.join(data.names())}, or a file.jsonl of "
         "{prompt, answer, reward} rows")
    flag("data_dir", None, "folder of local JSONL files, with the Hub's field names, instead of "
         "the Hub")
    flag("eval_data", None, "the held-out problems; default the test split of --data")
    flag("template", None, "how a problem becomes a prompt; default by task and model, see "
         "data/README.md", choices=data.TEMPLATES)
    flag("allow_unsafe_code", False, "sampled programs run also where nothing isolates them")
    flag("seed", 0, "the seed of problems, sampling and shuffling")
    flag("deterministic", False, "algorithms that give the same bits each time, slower; see "
         "docs/scaling.md")
    # batch: P problems x G completions -> S optimizer steps
    flag("rollouts", 200, "rollouts in all")
    flag("problems_per_rollout", 64, "problems sampled for one rollout, P")
    flag("group_size", 16, "completions of each, G")
    flag("steps_per_rollout", 16, "optimizer steps on one rollout, S: 2 is near on-policy, 16 "
         "off-policy")
    flag("shuffle", "completions", "what is dealt out to the steps: completions, or groups, whose "
         "prompts are then shared in the update, too", choices=("completions", "groups"))
    # the model's side
    flag("tokens_per_micro_batch", None, "tokens that go through the model at once; default by "
         "the memory there is", type=int)
    flag("share_prompts", True, "a prompt goes through the model once for all of its completions")
    flag("activation_checkpointing", False, "the backward pass computes layers again instead of "
         "keeping them")
    flag("compile", False, "torch.compile of each layer")
    flag("offload", False, "weights, gradients and optimizer stay on the CPU; under torchrun")
    flag("lora_rank", 0, "rank of adapters on every linear layer, which are trained instead of the "
         "weights, with ten times the learning rate if none is given; 0 is off")
    flag("lora_alpha", 32.0, "adapters are scaled by lora_alpha / lora_rank")
    # sampling
    flag("sampler", default_kind(), "vllm or transformers", choices=kinds)
    flag("max_tokens", 1024, "longest completion, in tokens")
    flag("max_prompt_tokens", 1024, "longest prompt, in tokens")
    flag("temperature", 1.0, "temperature of the policy, in sampling and training alike")
    flag("sampler_temperature", None, "temperature of the sampler alone, to be off-policy on "
         "purpose", type=float)
    flag("sampler_dtype", None, "the sampler's dtype, where it is not --dtype", choices=dtypes)
    flag("sampler_logprobs", "processed", "the sampler's log probabilities: processed, of what it "
         "drew from, or raw, before temperature", choices=("processed", "raw"))
    flag("gpu_memory_utilization", 0.4, "share of the GPU's memory for vLLM")
    flag("max_num_seqs", None, "sequences that vLLM works on at once; default 1024, or 256 where "
         "it has little memory", type=int)
    flag("tp", 1, "GPUs that one vLLM engine is spread over")
    flag("rollout_lag", 0, "rollouts between sampling and learning: it learns from what was "
         "sampled so many ago")
    # rewards
    flag("drop_uniform_groups", False, "groups that are all right or all wrong are replaced by "
         "newly sampled ones")
    flag("max_refills", None, "times that --drop_uniform_groups refills a rollout at most; "
         "default 4", type=int)
    flag("mask_truncated", False, "completions that hit max_tokens stay out of the loss")
    flag("overlong_penalty", 0, "the reward falls to -1 over the last so many tokens before "
         "max_tokens; 0 is off")
    # loss
    flag("old_logprobs", None, "the ratio's reference: the weights that sampled, by trainer or "
         "sampler, or those before the update (proximal); default the method's",
         choices=("trainer", "sampler", "proximal"))
    flag("correction", None, "weighs tokens by pi_trainer / pi_sampler: "
         f"{', '.join(losses.CORRECTIONS)}", choices=losses.CORRECTIONS, metavar="NAME")
    flag("correction_low", None, "least ratio that it keeps; default the correction's", type=float)
    flag("correction_high", None, "largest one; default the correction's", type=float)
    flag("kl_coef", 0.0, "weight of the KL to the initial model; 0 loads no reference")
    flag("entropy_coef", 0.0, "weight of the entropy bonus")
    # optimizer: AdamW on float32 weights
    flag("lr", 1e-6, "learning rate")
    flag("warmup", 0, "optimizer steps of linear warm-up")
    flag("schedule", "constant", "the learning rate's; cosine falls towards 0 at the end",
         choices=("constant", "cosine"))
    flag("weight_decay", 0.0, "weight decay of AdamW")
    flag("max_grad_norm", 1.0, "gradients are scaled down to this norm")
    flag("dtype", parallel.default_dtype(), "dtype of the trainer's computation", choices=dtypes)
    # evaluation and log
    flag("eval_every", 10, "rollouts between evaluations on held-out problems; 0 is never")
    flag("eval_problems", 256, "held-out problems")
    flag("eval_samples", 16, "completions of each")
    flag("save_every", 20, "rollouts between checkpoints; 0 is only at the end")
    flag("keep", 2, "checkpoints kept, besides the best one")
    flag("save_rollouts", False, "every rollout is kept as a file, to analyse its updates")
    flag("resume", False, "continue the run in --out, with its flags, from its newest checkpoint; "
         "start it where there is none")
    flag("force", False, "--resume also with other flags of the method or other data")
    flag("check", False, "try everything on a few completions, print a table, and stop")
    flag("fit", None, "GPUs x GB, as 8x80: does the run fit? Rehearsed on a CPU, without weights")
    flag("rank_every", 0, "rollouts between looks at the rank of the LM head's change; 0 is never")
    flag("out", None, "the run's folder; default runs/<loss>-<steps>-<seed>")
    flag("wandb", None, "Weights & Biases project to log to, too")
    flag("trackio", None, "Trackio project to log to, too")
    flag("tensorboard", False, "log for TensorBoard, too, in the run's folder")


def parse_args(argv=None):
    """-> args, and the Method with its hyperparameters. Refuses what cannot work."""
    return cli.parse_args(argv, add_flags, __doc__)


# ---------------------------------------------------------------------------- sample, grade, score

class Group(NamedTuple):
    """G completions of one problem."""

    problem: dict
    prompt: list[int]               # token ids
    completions: list[Completion]
    texts: list[str]
    rewards: list[float]


def sample_groups(sampler, tokenizer, problems, args, seed, timed):
    """-> a Group of each problem, and what the graders counted."""
    prompts = [data.encode(tokenizer, p, args.template) for p in problems]
    if (longest := max(map(len, prompts))) > args.max_prompt_tokens:
        raise RunFailed(f"a prompt of {longest} tokens is longer than --max_prompt_tokens "
                        f"{args.max_prompt_tokens}")
    with timed("sample"):
        completions = sampler.sample(prompts, args.group_size, seed=seed,
                                     temperature=args.sampler_temperature,
                                     max_tokens=args.max_tokens)
    with timed("reward"):
        texts = [[data.decode(tokenizer, c, prompt) for c in group]
                 for prompt, group in zip(prompts, completions, strict=True)]
        rewards, counts = grade(problems, texts)
    groups = zip(problems, prompts, completions, texts, rewards, strict=True)
    return [Group(*fields) for fields in groups], counts


def sample_and_grade(sampler, tokenizer, train_set, args, rollout, timed):
    """-> the P groups to learn from, and what to log of all that was sampled.

    With --drop_uniform_groups (DAPO's dynamic sampling) groups that teach nothing are replaced,
    from other problems, up to --max_refills times. What is still missing then is filled up with
    them, so that the batch keeps its size."""
    mixed, uniform, counters, slowest = [], [], Counter(), 0.0
    for attempt in range(1 + args.max_refills):
        if attempt and len(mixed) >= args.problems_per_rollout:
            break
        counts = {}

        def on_engine(problems, engine):
            seed = seed_of(args.seed, rollout, attempt, engine)
            groups, counted = sample_groups(sampler, tokenizer, problems, args, seed, timed)
            counts.update(counted)
            return groups

        problems = data.batch(train_set, args.problems_per_rollout, args.seed, rollout, attempt)
        for group in parallel.map_over_engines(on_engine, problems, args.tp):
            (mixed if len(set(group.rewards)) > 1 else uniform).append(group)
        for counted in parallel.gather(counts)[::args.tp]:  # one of each engine's ranks
            slowest = max(slowest, counted.pop("seconds_max"))
            counters.update(counted)
    groups, counters["seconds_max"] = mixed + uniform, slowest
    metrics = {**log.outcome(groups, counters["unparsed_answer"]),
               **{f"grader/{k}": v for k, v in counters.items()}}
    return groups[:args.problems_per_rollout], metrics


def scored_batch(policy, reference, groups, args):
    """-> the Batch of the groups' P G completions with the log probabilities of the weights that
    sampled them, and what to log of those."""
    completions = [c for group in groups for c in group.completions]
    prompts = [group.prompt for group in groups for _ in group.completions]
    batch = make_batch(prompts, completions, parallel.device())
    logprobs, batch.entropy = compute_logprobs(policy, batch)
    batch.old_logprobs = batch.sampler_logprobs if args.old_logprobs == "sampler" else logprobs
    if reference:
        batch.ref_logprobs, _ = compute_logprobs(reference, batch)
    metrics = log.agreement(logprobs, batch)
    metrics["policy/entropy"] = batch.entropy[batch.mask].mean().item()
    if args.mask_truncated:
        truncated = torch.tensor([c.truncated for c in completions], device=parallel.device())
        batch.mask &= ~truncated[:, None]
    return batch, metrics


def rewards_of(groups, batch, args):
    """-> rewards [P, G]. With --overlong_penalty (DAPO, eq. 13) they fall linearly, by up to 1,
    over the last so many tokens before the limit."""
    rewards = torch.tensor([group.rewards for group in groups], device=parallel.device())
    if not args.overlong_penalty:
        return rewards
    over = batch.completion_len - (args.max_tokens - args.overlong_penalty)
    return rewards - (over / args.overlong_penalty).clamp(0, 1).view_as(rewards)


def evaluate(sampler, tokenizer, test_set, args):
    """-> {eval/<data>/<metric>: value} of the held-out problems, at the sampler's weights.

    All evaluations of a run have one seed: where weights have not changed, nor has a score."""
    def rows_of(problems, engine):
        rows, _ = sample_rows(
            sampler, tokenizer, problems, args.eval_samples, template=args.template,
            seed=seed_of("eval", args.seed, engine), temperature=args.temperature,
            max_tokens=args.max_tokens)
        return rows
    rows = parallel.map_over_engines(rows_of, test_set, args.tp)
    scores = summarise(rows, powers_of_two(args.eval_samples))
    return {f"eval/{args.eval_data or args.data}/{name}": x for name, x in scores.items()}


# ---------------------------------------------------------------------------- one optimizer step

def minibatches(batch, method, args, rollout):
    """The completions of each optimizer step, and the tokens among them: a shuffled S-th of the
    rollout each, or of its groups, once for every pass of the method."""
    together = args.group_size if args.shuffle == "groups" else 1
    shares = shuffled_shares(len(batch.ids), args.steps_per_rollout, args.seed, rollout, together)
    for token_filter in method.passes:
        for share in shares:
            minibatch = batch.rows(share.to(batch.ids.device))
            if minibatch.mask.any():  # or --mask_truncated left nothing: counted in optim/skipped
                yield minibatch, token_filter


def update(policy, optimizer, schedule, scaler, minibatch, method, args,
           token_filter=losses.every_token):
    """One optimizer step. Returns its metrics.

    In float16 the gradient is scaled, and scaled back before it is used. Where it overflows, the
    step is not taken, and the next has a smaller scale. Raises NotFinite, with nothing changed,
    where the loss is not finite, or the gradient and no scaling can help."""
    metrics = backward(policy, minibatch, method, args.max_tokens, token_filter,
                       args.entropy_coef, scaler.scale, correction=args.correction,
                       correction_low=args.correction_low, correction_high=args.correction_high,
                       kl_coef=args.kl_coef)
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm)
    metrics["grad_norm"] = parallel.full(norm)
    overflow = not metrics["grad_norm"].isfinite()
    if not metrics["loss"].isfinite() or overflow and scaler.get_scale() <= 1:
        raise NotFinite(f"optimizer step {schedule.last_epoch + 1}: loss {metrics['loss'].item()}, "
                        f"gradient norm {metrics['grad_norm'].item()}", minibatch)
    scaler.step(optimizer)  # not where a gradient overflowed
    scaler.update()
    metrics["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    metrics["overflow"] = torch.tensor(float(overflow))
    if not overflow:
        schedule.step()
    optimizer.zero_grad(set_to_none=True)  # now: the sampler needs the memory
    return metrics


# ---------------------------------------------------------------------------- the run

def load_policy(args, method, tokenizer, eos, problem, resumed_from):
    """-> the policy, the reference of --kl_coef (or None), the optimizer, its schedule and the
    scaler of float16's gradients."""
    from engine import loading
    torch.manual_seed(args.seed)  # LoRA's first adapters are drawn
    probe = loading.probe_batch(data.encode(tokenizer, problem, args.template)[:64], eos[0])
    settings = dict(temperature=args.temperature, dtype=args.dtype, offload=args.offload,
                    longest=args.max_prompt_tokens + args.max_tokens,
                    share_prompts=args.share_prompts)
    # adapters come with trainer.pt, on top of the initial weights
    folder = args.model if args.lora_rank or not resumed_from else resumed_from
    reference = None
    try:
        policy = loading.load(
            folder, eos, probe, budget=args.tokens_per_micro_batch, compile=args.compile,
            lora_rank=args.lora_rank, lora_alpha=args.lora_alpha, reference=bool(args.kl_coef),
            activation_checkpointing=args.activation_checkpointing, **settings)
        args.tokens_per_micro_batch = policy.budget
        if args.kl_coef:
            reference = loading.load(args.model, eos, probe, budget=policy.budget, frozen=True,
                                     **settings)
    except ValueError as e:
        cli.refuse(f"--model {args.model} {e}")
    parameters = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=args.weight_decay,
                                  fused=True)
    steps = args.rollouts * args.steps_per_rollout * len(method.passes)
    factor = loading.lr_factor(args.warmup, args.schedule, steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    # off, it scales by 1 and steps as the optimizer does
    scaler = torch.amp.GradScaler(parallel.device().type, enabled=args.dtype == "float16")
    return policy, reference, optimizer, schedule, scaler


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if any(text.startswith("--fit") for text in argv):  # before flags are parsed, as for its GPUs
        from experiment import fit
        sys.exit(fit.main(argv, parse_args, load_policy, update))
    args, method = parse_args(argv)
    parallel.start(args.deterministic)
    train_set, test_set, left_out = cli.load_data(args)

    # ---- the policy, its optimizer, and a sampler of the same weights. What takes seconds to
    # import is imported here: flags and data are right
    from transformers.utils.logging import disable_progress_bar

    from experiment import check
    from experiment.run import Run, banner, newest_checkpoint
    disable_progress_bar()  # of loading and saving: the run's own bar is enough
    if args.model is None:
        args.model = BASE
    tokenizer, eos, train_set = cli.load_tokenizer(args, train_set, test_set)
    resumed_from = newest_checkpoint(args)
    policy, reference, optimizer, schedule, scaler = load_policy(
        args, method, tokenizer, eos, train_set[0], resumed_from)

    def load_sampler():  # a run claims its folder before this takes its time
        return make_sampler(args.sampler, args.model, dtype=args.sampler_dtype, eos=eos,
                            memory=args.gpu_memory_utilization, tp=args.tp,
                            max_num_seqs=args.max_num_seqs, logprobs=args.sampler_logprobs,
                            max_length=args.max_prompt_tokens + args.max_tokens)
    if args.check:
        cli.say(banner(args, method, policy, None, 0))
        sys.exit(check.run(args, method, policy, load_sampler(), tokenizer, eos, train_set,
                           test_set, left_out))

    with Run(args, method, policy, optimizer, schedule, scaler, tokenizer, resumed_from) as run:
        sampler = load_sampler()
        if resumed_from:
            sampler.load_weights(parallel.weights(policy))
        elif args.eval_every:
            run.log_evaluation(evaluate(sampler, tokenizer, test_set, args))

        for rollout in run.rollouts():
            # ---- sample P problems x G completions, and grade them
            sampled = [sample_and_grade(sampler, tokenizer, train_set, args, number, run.timed)
                       for number in run.to_sample()]  # --rollout_lag ahead of the learning
            sampler.sleep()

            # ---- score: log pi of every token, of the weights that sampled
            for groups, metrics in sampled:
                with run.timed("logp"):
                    batch, gaps = scored_batch(policy, reference, groups, args)
                run.pending.append((batch, rewards_of(groups, batch, args), {**metrics, **gaps},
                                    log.examples(groups, tokenizer)))
            batch, rewards, metrics, samples = run.pending.popleft()
            if args.old_logprobs == "proximal" and args.rollout_lag:  # other weights sampled
                batch.old_logprobs, _ = compute_logprobs(policy, batch)

            # ---- advantages
            run.state["entropy"] = metrics["policy/entropy"]
            run.keep_rollout(batch, rewards)
            advantages = group_advantages(method, rewards, run.state)  # [P, G]
            batch.advantages = advantages.reshape(-1, 1).expand(batch.mask.shape)

            # ---- S optimizer steps, each on its own share of the completions
            with run.timed("update"):
                steps = [update(policy, optimizer, schedule, scaler, minibatch, method, args,
                                token_filter)
                         for minibatch, token_filter in minibatches(batch, method, args, rollout)]

            # ---- weights to the sampler
            with run.timed("sync"):
                sampler.wake()
                sampler.load_weights(parallel.weights(policy))

            # ---- evaluate, log, save
            if run.due(args.eval_every):
                with run.timed("eval"):
                    metrics.update(evaluate(sampler, tokenizer, test_set, args))
            run.log(batch, advantages, steps, metrics, samples)
            run.save(metrics)

    sampler.close()  # before the process group
    parallel.stop()
    if run.stopping:
        sys.exit(128 + run.stopping[0])


if __name__ == "__main__":
    try:
        main()
    except (RunFailed, FloatingPointError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("train.py: interrupted; --resume continues from the last checkpoint, or starts again "
              "where there is none", file=sys.stderr)
        sys.exit(130)
