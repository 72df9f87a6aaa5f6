"""RL with verifiable rewards: sample, grade, score, update, sync, log.

    python train.py --loss fade --steps_per_rollout 16          the embedded base, on a laptop
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data countdown34 --loss acpo
    torchrun --nproc_per_node 8 train.py --model Qwen/Qwen2.5-7B --data orz --eval_data math500 --max_tokens 3072 --loss p3o

The method is a row of losses.METHODS; its functions' keyword-only arguments are flags here. `--loss NAME --help`
lists them. The loop is `main`, at the end; what one optimizer step does is `update`.
"""

import json
import os
import signal
import sys
import time
import uuid
from collections import Counter, deque
from dataclasses import asdict
from functools import partial

import torch
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import analyze
import check
import checkpoint
import data
import figures
import log
import losses
import parallel
from checkpoint import RunFailed
from data import tiny
from eval import powers_of_two, sample, summarise
from losses import every_token, group_advantages
from policy import Batch, backward, head_of, load, lr_factor, make_batch, score
from rewards import grade
from sampler import Completion, make_sampler, seed_of
from settings import default_out, flags_of, load_data, load_tokenizer, parse_args, refuse, say


# ---------------------------------------------------------------------------- one optimizer step

def update(policy, optimizer, schedule, batch, method, hp, args, only=every_token):
    """One optimizer step. Returns its metrics; raises FloatingPointError, with nothing changed, where loss or
    gradient is not finite."""
    optimizer.zero_grad(set_to_none=True)
    metrics = backward(policy, batch, method, hp, args.max_tokens, only, args.entropy_coef, tis_cap=args.tis_cap, kl_coef=args.kl_coef)
    metrics["grad_norm"] = parallel.full(torch.nn.utils.clip_grad_norm_(policy.parameters(), args.max_grad_norm))
    if not (metrics["loss"].isfinite() and metrics["grad_norm"].isfinite()):
        raise FloatingPointError(f"loss {metrics['loss'].item()}, gradient norm {metrics['grad_norm'].item()}")
    optimizer.step()
    metrics["lr"] = torch.tensor(optimizer.param_groups[0]["lr"], dtype=torch.float64)
    schedule.step()
    return metrics


# ---------------------------------------------------------------------------- one rollout

def sample_groups(sampler, tokenizer, train_set, args, rollout, times):
    """-> the P groups to learn from and the others, each (problem, prompt, completions, texts, rewards), and what the
    verifier counted.

    With --drop_uniform_groups (DAPO's dynamic sampling) groups that teach nothing are replaced, from other problems,
    up to --max_refills times; what is still missing then is filled up with them, so that the batch keeps its size."""
    mixed, uniform, counters = [], [], Counter()
    for attempt in range(1 + args.max_refills):
        if attempt and len(mixed) >= args.problems_per_rollout:
            break
        own = Counter()

        def sampled(problems, engine):  # this rank's share of them
            prompts = [data.encode(tokenizer, p, args.template) for p in problems]
            if (longest := max(map(len, prompts))) > args.max_prompt_tokens:
                raise RunFailed(f"a prompt of {longest} tokens is longer than --max_prompt_tokens {args.max_prompt_tokens}")
            with log.timed(times, "sample"):
                groups = sampler.sample(prompts, args.group_size, seed=seed_of(args.seed, rollout, attempt, engine),
                                        temperature=args.sampler_temperature, max_tokens=args.max_tokens)
            with log.timed(times, "reward"):
                texts = [[data.decode(tokenizer, c, prompt) for c in g] for prompt, g in zip(prompts, groups)]
                rewards, counted = grade(problems, texts)
            own.update(counted)
            return list(zip(problems, prompts, groups, texts, rewards))

        problems = data.batch(train_set, args.problems_per_rollout, args.seed, rollout, attempt)
        for group in parallel.spread(sampled, problems, args.tp):
            (mixed if len(set(group[-1])) > 1 else uniform).append(group)
        for counted in parallel.gather(own)[::args.tp]:
            slowest = max(counters["seconds_max"], counted.pop("seconds_max"))
            counters.update(counted)
            counters["seconds_max"] = slowest
    groups = mixed + uniform
    return groups[:args.problems_per_rollout], groups[args.problems_per_rollout:], counters


def collect(policy, reference, sampler, tokenizer, train_set, args, rollout, times):
    """Samples, grades and scores one rollout -> batch [N = P G], rewards [P, G], what to log of it, some completions."""
    groups, spare, counters = sample_groups(sampler, tokenizer, train_set, args, rollout, times)
    completions = [c for group in groups for c in group[2]]
    batch = make_batch([prompt for _, prompt, cs, _, _ in groups for _ in cs], completions, parallel.device())
    with log.timed(times, "logp"):
        logprobs, batch.entropy = score(policy, batch)
        batch.old_logprobs = logprobs if args.old_logprobs == "trainer" else batch.sampler_logprobs
        if reference:
            batch.ref_logprobs, _ = score(reference, batch)
    rewards = torch.tensor([group[4] for group in groups], device=parallel.device())
    metrics = dict(log.outcome(groups + spare), **log.agreement(logprobs, batch),
                   **{f"grader/{k}": v for k, v in counters.items()})
    metrics["policy/entropy"] = batch.entropy[batch.mask].mean().item()
    if args.overlong_penalty:  # DAPO eq. 13: 0, then falling linearly to -1 at the limit
        over = batch.completion_len - (args.max_tokens - args.overlong_penalty)
        rewards = rewards - (over / args.overlong_penalty).clamp(0, 1).view_as(rewards)
    if args.mask_truncated:
        batch.mask &= ~torch.tensor([c.truncated for c in completions], device=parallel.device())[:, None]
    samples = [dict(prompt=tokenizer.decode(prompt), completion=text, answer=problem["answer"], reward=problem["reward"], score=reward,
                    tokens=len(c.tokens), truncated=c.truncated)
               for problem, prompt, cs, texts, graded in groups[:2] for c, text, reward in list(zip(cs, texts, graded))[:2]]
    return batch, rewards, metrics, samples


# ---------------------------------------------------------------------------- the run's folder

def start_run(args, method, hp, resumed_at=None):
    """-> the run's folder, which belongs to this process from here on. A new run gets one that no other has, with
    config.json: flags, versions, commit. A resumed one has its logs set back to rollout `resumed_at`, None being its start."""
    out, name, taken = default_out(args), default_out(args).name, 1
    while True:
        try:
            out.mkdir(parents=True, exist_ok=True)
            checkpoint.lock(out)
            if args.resume:
                checkpoint.rewind(out, resumed_at)
            else:
                (out / "metrics.jsonl").open("x").close()
            break
        except (FileExistsError, BlockingIOError) as e:
            if args.out or args.resume:
                refuse(f"--out {out} " + ("already holds a run; --resume continues it, or give another folder" if isinstance(e, FileExistsError)
                                          else "is another process's at this moment"))
            out = out.with_name(f"{name}.{(taken := taken + 1)}")
        except OSError as e:
            refuse(f"--out {out} cannot be written: {e.strerror}")
    config = dict(flags=flags_of(args), method=losses.describe(args.loss, method, hp), hyperparameters=hp, command=sys.argv,
                  versions=log.versions(), git=log.commit(), id=uuid.uuid4().hex, before=[])  # the id is Weights & Biases'
    if resumed_at is not None:
        last = json.loads((out / "config.json").read_text())
        config.update(id=last["id"], before=last.pop("before") + [dict(last, until_rollout=resumed_at)])
    checkpoint.write(out / "config.json", json.dumps(config, indent=1))
    return out


# ---------------------------------------------------------------------------- the loop

def main(argv=None):
    parallel.start()
    args, method, hp = parse_args(argv, __doc__)
    disable_progress_bar()  # of loading and saving: the run's own bar is enough
    train_set, test_set, left_out = load_data(args)
    if args.model is None:
        args.model = parallel.first_says(tiny.base_model)
    tokenizer, eos, train_set = load_tokenizer(args, train_set, test_set)
    found = parallel.first_says(partial(checkpoint.newest, default_out(args))) if args.resume else None

    # ---- the policy, its optimizer, and a sampler of the same weights
    torch.manual_seed(args.seed)  # of LoRA's first adapters
    ids = data.encode(tokenizer, train_set[0], args.template)[:64]
    probe = make_batch([[eos[0]]] * 4, [Completion(ids[:max(1, n)], [0.0], False) for n in (len(ids), len(ids) // 2, len(ids) // 3, 1)])
    loading = dict(temperature=args.temperature, dtype=args.dtype, longest=args.max_prompt_tokens + args.max_tokens, offload=args.offload)
    try:
        policy = load(args.model if args.lora_rank or not found else found, eos, probe, budget=args.tokens_per_micro_batch, compile=args.compile,
                      lora_rank=args.lora_rank, activation_checkpointing=args.activation_checkpointing, **loading)
        args.tokens_per_micro_batch = policy.budget
        reference = load(args.model, eos, probe, budget=policy.budget, **loading).requires_grad_(False) if args.kl_coef else None
    except ValueError as e:
        refuse(f"--model {args.model} {e}")
    optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], lr=args.lr, weight_decay=args.weight_decay, fused=True)
    steps = args.rollouts * args.steps_per_rollout * len(method.passes)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_factor(args.warmup, args.schedule, steps))

    # what a run is besides its weights; checkpoints hold all of it
    run = dict(rollout=0, sampled=0, best=None, pending=[], state={}, totals={}, optimizer_steps=0)
    if found:
        run.update(checkpoint.restore(found, policy, optimizer))
        schedule.last_epoch = run["optimizer_steps"]
        for group in optimizer.param_groups:  # as the flags are now: --force may have changed them
            group.update(lr=args.lr * schedule.lr_lambdas[0](schedule.last_epoch), initial_lr=args.lr, weight_decay=args.weight_decay)
        if any(args.saved[name] != args.given[name] for name in ("loss", "advantage")):
            run["state"] = {}  # another method's averages
    state = run["state"]  # the method's own, FADE's averages
    pending = deque((Batch(**b).to(parallel.device()), r.to(parallel.device()), *rest) for b, r, *rest in run["pending"])  # not yet learnt from
    totals = Counter(run["totals"])  # optimizer steps, generated tokens, seconds and floating-point operations so far
    sampled, best = run["sampled"], run["best"]

    out = None if args.check else parallel.first_says(lambda: start_run(args, method, hp, run["rollout"] if found else None))
    sequences = args.problems_per_rollout * args.group_size
    say(f"model    {args.model}\nmethod   {losses.describe(args.loss, method, hp)}\n"
        f"rollout  {args.problems_per_rollout} problems x {args.group_size} completions = {sequences} sequences -> "
        f"{args.steps_per_rollout * len(method.passes)} optimizer steps of {sequences // args.steps_per_rollout}\n"
        f"passes   of at most {policy.budget} tokens{', packed' * policy.packed}, on {parallel.world()} rank{'s' * (parallel.world() > 1)}\n"
        f"folder   {out or 'none: --check keeps nothing'}{', from rollout ' + str(run['rollout']) if args.resume else ''}\n"
        "A loss near 0 is as it should be: advantages sum to about 0. Watch reward and the held-out mean@n.")
    sampler = make_sampler(args.sampler, args.model, dtype=args.sampler_dtype, eos=eos, memory=args.gpu_memory_utilization,
                           max_length=args.max_prompt_tokens + args.max_tokens, tp=args.tp)
    if args.check:
        right = check.table(args, policy, sampler, tokenizer, eos, train_set, test_set, method, hp, left_out)
        sampler.close()
        parallel.stop()
        sys.exit(0 if right else 1)
    if found:
        sampler.load_weights(parallel.weights(policy))
    head, parameters = policy.model.get_output_embeddings().weight, sum(p.numel() for p in policy.parameters())
    first_head = head_of(args.model) if args.rank_every else None

    def held_out(rollout):
        def share(problems, engine):
            return sample(sampler, tokenizer, problems, args.eval_samples, seed=seed_of("eval", rollout, engine), template=args.template,
                          temperature=args.temperature, max_tokens=args.max_tokens)[0]
        scores = summarise(parallel.spread(share, test_set, args.tp), powers_of_two(args.eval_samples))
        return {f"eval/{args.eval_data or args.data}/{name}": value for name, value in scores.items()}

    first = parallel.rank() == 0
    book = log.Log(out, args) if first else None
    stopping, bar = [], tqdm(total=args.rollouts, initial=run["rollout"], unit="rollout", dynamic_ncols=True, disable=not first, leave=False)

    def write(record, samples=()):
        if first:
            book.write(record, samples)
            bar.write(log.line(record))

    if args.eval_every and not found:
        began = time.perf_counter()
        write(dict(rollout=0, **held_out(0), **{"time/rollout": time.perf_counter() - began}))

    asked = []  # signals that asked for the end of the run

    def note(number, _):
        if asked:
            raise KeyboardInterrupt
        asked.append(number)
        os.write(2, b"\ntrain.py: saving and stopping after this rollout; once more stops at once\n")  # print may be what was interrupted
    handlers = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}

    for rollout in range(run["rollout"] + 1, args.rollouts + 1):
        times = Counter()
        began = time.perf_counter()
        torch.manual_seed(seed_of("rollout", args.seed, rollout))  # so that a method that draws numbers can be resumed, too

        # ---- sample, grade, score: as many rollouts ahead as --rollout_lag says
        while sampled < min(rollout + args.rollout_lag, args.rollouts):
            pending.append(collect(policy, reference, sampler, tokenizer, train_set, args, sampled, times))
            sampled += 1
        sampler.sleep()
        batch, rewards, metrics, samples = pending.popleft()

        # ---- advantages
        state["entropy"] = metrics["policy/entropy"]
        if args.save_rollouts and first:
            checkpoint.save_rollout(out, rollout, batch=asdict(batch), rewards=rewards, state=dict(state), flags=flags_of(args), hp=hp)
        advantages = group_advantages(method, rewards, state, **hp)  # [P, G]
        batch.advantages = advantages.view(-1, 1).expand(batch.mask.shape)

        # ---- optimizer steps, each on its own share of the completions
        before = head.detach().clone()
        shuffle = torch.Generator().manual_seed(seed_of("shuffle", args.seed, rollout))
        shares = torch.randperm(sequences, generator=shuffle).to(parallel.device()).chunk(args.steps_per_rollout)
        records = []
        with log.timed(times, "update"):
            for only in method.passes:
                for share in shares:
                    rows = batch.rows(share)
                    if not rows.mask.any():
                        continue  # all of it truncated, under --mask_truncated: counted in optim/skipped
                    try:
                        records.append(update(policy, optimizer, schedule, rows, method, hp, args, only))
                    except FloatingPointError as e:
                        if first:
                            torch.save(asdict(rows), out / "failed_batch.pt")
                        raise RunFailed(f"rollout {rollout}, optimizer step {totals['step'] + len(records) + 1}: {e}; "
                                        f"its batch is in {out / 'failed_batch.pt'}") from None

        # ---- weights to the sampler
        with log.timed(times, "sync"):
            sampler.wake()
            sampler.load_weights(parallel.weights(policy))

        # ---- evaluate, log, save
        if args.eval_every and (rollout % args.eval_every == 0 or rollout == args.rollouts):
            with log.timed(times, "eval"):
                metrics.update(held_out(rollout))
        metrics.update(log.advantages(advantages, batch))
        metrics.update({f"adv/{name}": value for name, value in state.items() if name != "entropy"})
        metrics.update({**log.optimizer_steps(records), "policy/entropy": metrics["policy/entropy"]})
        metrics["optim/skipped"] = len(shares) * len(method.passes) - len(records)
        metrics["optim/update_ratio"] = (parallel.full((head - before).norm()) / parallel.full(before.norm())).item()  # of the LM head
        if args.rank_every and rollout % args.rank_every == 0:
            metrics["optim/head_rank1_share"] = log.rank1_share(parallel.full(head.detach()).cpu() - first_head)
        seconds = time.perf_counter() - began
        read = int((batch.prompt_len + batch.completion_len).sum())  # 2 operations a parameter forward, 4 back
        passes = 2 + 6 * len(method.passes) + 2 * bool(reference)
        totals.update(step=len(records), tokens=metrics["len/sum"], seconds=seconds, flops=passes * parameters * read)
        write(dict(rollout=rollout, **totals, **metrics, **times, **{
            "time/rollout": seconds, "perf/tokens_per_s": metrics["len/sum"] / seconds, "perf/mem_peak_gb": parallel.peak_memory() / 1e9}), samples)
        bar.update()
        stopping = sum(parallel.gather(asked), []) if rollout < args.rollouts else []
        if stopping or rollout == args.rollouts or args.save_every and rollout % args.save_every == 0:
            score_here = metrics.get(f"eval/{args.eval_data or args.data}/mean@{args.eval_samples}")
            if score_here is not None and (best is None or score_here > best["score"]):
                best = dict(rollout=rollout, score=score_here)
            checkpoint.save(out, rollout, policy, tokenizer, optimizer, args.keep, best, sampled=sampled, optimizer_steps=schedule.last_epoch,
                            state=state, totals=dict(totals), pending=[(asdict(b), *rest) for b, *rest in pending])
        if stopping:
            break

    bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if first and not stopping:
        figures.curves(analyze.grouped(analyze.read(out)), out / "curves.png")
    say(f"stopped by a signal; train.py --out {out} --resume continues" if stopping else
        f"done: {out / 'curves.png'}, {out / 'metrics.jsonl'}, {out / 'checkpoints'}")
    sampler.close()  # before the process group
    parallel.stop()
    if stopping:
        sys.exit(128 + stopping[0])


if __name__ == "__main__":
    try:
        main()
    except (RunFailed, FloatingPointError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("train.py: interrupted; --resume continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)
