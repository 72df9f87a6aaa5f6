"""RL with verifiable rewards, one process: sample, grade, score, update, sync, log.

    python train.py --loss fade --steps_per_rollout 16          the embedded base, on a laptop
    python train.py --model Qwen/Qwen2.5-1.5B-Instruct --data countdown34 --loss acpo

The method is a row of losses.METHODS; its functions' keyword-only arguments are flags here. `--loss NAME --help`
lists them. The loop is `main`, at the end; what one optimizer step does is `update`.
"""

import argparse
import copy
import importlib.util
import json
import math
import shutil
import sys
import time
from collections import Counter, deque
from dataclasses import asdict, replace
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import analyze
import data
import log
import losses
import sandbox
from data import tiny
from eval import evaluate
from losses import METHODS, Tokens, every_token, group_advantages, policy_loss
from policy import backward, load, make_batch, score
from rewards import grade
from sampler import Completion, default_kind, eos_ids, make_sampler, seed_of

# what is right for a model of a million parameters; the defaults below are for real ones
EMBEDDED = dict(rollouts=50, max_tokens=16, max_prompt_tokens=32, lr=5e-5, rank_every=10, tokens_per_micro_batch=4096)


class RunFailed(RuntimeError):
    """The run cannot go on: one sentence for the user, exit code 1."""


# ---------------------------------------------------------------------------- settings

def refuse(message):
    """Bad flags, data or model: one sentence and exit code 2."""
    print(f"train.py: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # without the page of usage in front of it
        refuse(message)


def add_flags(parser):
    """The flags that every method has, each with its default and what it is."""
    def flag(name, default, help, **kw):
        parser.add_argument(f"--{name}", default=default, help=f"{help} ({default})",
                            **({"type": type(default)} if default is not None and "action" not in kw else {}), **kw)
    # method
    flag("loss", "grpo", "the method", choices=METHODS, metavar="NAME")
    for axis in losses.AXES:
        flag(axis, None, f"another {axis} than the method's", choices=losses.cells(axis), metavar="NAME")
    # problem
    flag("model", None, "Hugging Face folder or id; without it the embedded base, with settings of its own")
    flag("data", "countdown", f"the problems: {', '.join(data.names())}, or a file.jsonl of {{prompt, answer, reward}} rows")
    flag("data_dir", None, "folder of local JSONL files, with the Hub's field names, instead of the Hub")
    flag("eval_data", None, "the held-out problems; default the test split of --data")
    flag("template", None, "how a problem becomes a prompt; default by task and model, see data/README.md", choices=data.TEMPLATES)
    flag("allow_unsafe_code", False, "run sampled programs also where nothing isolates them", action="store_true")
    flag("seed", 0, "of problems, sampling and shuffling")
    # batch: P problems x G completions -> S optimizer steps
    flag("rollouts", 200, "rollouts in all")
    flag("problems_per_rollout", 64, "problems sampled for one rollout, P")
    flag("group_size", 16, "completions of each, G")
    flag("steps_per_rollout", 16, "optimizer steps on one rollout, S: 2 is near on-policy, 16 off-policy")
    flag("tokens_per_micro_batch", 16384, "tokens, with padding, that go through the model at once")
    # sampling
    flag("sampler", default_kind(), "vllm or transformers", choices=("vllm", "transformers"))
    flag("max_tokens", 1024, "longest completion, in tokens")
    flag("max_prompt_tokens", 1024, "longest prompt, in tokens")
    flag("temperature", 1.0, "of the policy, in sampling and training alike")
    flag("sampler_temperature", None, "of the sampler alone, to be off-policy on purpose", type=float)
    flag("sampler_dtype", None, "float32 or bfloat16, where it is not --dtype", choices=("float32", "bfloat16"))
    flag("sampler_memory", 0.4, "share of the GPU's memory for vLLM")
    flag("rollout_lag", 0, "train on what was sampled this many rollouts ago")
    # rewards
    flag("drop_uniform_groups", False, "sample anew for groups that are all right or all wrong", action="store_true")
    flag("max_refills", None, "times that --drop_uniform_groups refills a rollout at most; default 4", type=int)
    flag("mask_truncated", False, "leave completions that hit max_tokens out of the loss", action="store_true")
    flag("overlong_penalty", 0, "reward falls to -1 over the last so many tokens before max_tokens; 0 is off")
    # loss
    flag("old_logprobs", None, "the ratio's reference: trainer or sampler; default the method's",
         choices=("trainer", "sampler"))
    flag("tis_cap", 0.0, "weigh tokens by min(pi_trainer / pi_sampler, cap); 0 is off")
    flag("kl_coef", 0.0, "of the KL to the initial model; 0 loads no reference")
    flag("entropy_coef", 0.0, "of the entropy bonus")
    # optimizer: AdamW on float32 weights
    flag("lr", 1e-6, "learning rate")
    flag("warmup", 0, "optimizer steps of linear warm-up")
    flag("schedule", "constant", "constant or cosine, towards 0 at the end", choices=("constant", "cosine"))
    flag("weight_decay", 0.0, "AdamW's")
    flag("max_grad_norm", 1.0, "gradients are scaled down to this norm")
    flag("dtype", "bfloat16" if torch.cuda.is_available() else "float32", "of the trainer's computation",
         choices=("float32", "bfloat16"))
    # evaluation and log
    flag("eval_every", 10, "rollouts between evaluations on held-out problems; 0 is never")
    flag("eval_problems", 256, "held-out problems")
    flag("eval_samples", 16, "completions of each")
    flag("save_every", 20, "rollouts between checkpoints; 0 is only at the end")
    flag("keep", 2, "checkpoints kept")
    flag("rank_every", 0, "rollouts between looks at the rank of the LM head's change; 0 is never")
    flag("out", None, "the run's folder; default runs/<loss>-<steps>-<seed>")
    flag("wandb", None, "also log to this Weights & Biases project")
    flag("tensorboard", False, "also log for TensorBoard, in the run's folder", action="store_true")


def parse_args(argv=None):
    """-> args, method, hp. Everything that can be said before a model loads is checked here, with exit code 2."""
    parser = Parser(prog="train.py", allow_abbrev=False, description=__doc__, add_help=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)

    add_flags(parser)

    # which method, first: its flags join the others
    chosen, _ = parser.parse_known_args(argv)
    method = replace(METHODS[chosen.loss], **{axis: losses.cells(axis)[name] for axis in losses.AXES
                                             if (name := getattr(chosen, axis))})
    for name, default in method.flags.items():
        parser.add_argument(f"--{name}", type=float if default is None else type(default), default=default,
                            help=f"of {chosen.loss} ({default})")
    parser.add_argument("-h", "--help", action="help", help="this page, for the method chosen")
    if chosen.model is None:
        parser.set_defaults(**EMBEDDED)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0]
        owners = [loss for loss, m in METHODS.items() if name[2:] in m.flags]
        refuse((f"{name} is a flag of {', '.join(owners)}; " if owners else f"{name}: there is no such flag; --help lists them; ")
               + f"{chosen.loss} has {', '.join('--' + f for f in method.flags) or 'none of its own'}")
    hp = {name: getattr(args, name) for name in method.flags}
    args.old_logprobs = args.old_logprobs or method.old_logprobs
    if args.max_refills is not None and not args.drop_uniform_groups:
        refuse("--max_refills is for --drop_uniform_groups, which is not given")
    if args.max_refills is None:
        args.max_refills = 4 * args.drop_uniform_groups
    if args.sampler_temperature is None:
        args.sampler_temperature = args.temperature
    args.sampler_dtype = args.sampler_dtype or args.dtype
    check(args, method, hp)
    return args, method, hp


def check(args, method, hp):
    """Arithmetic, combinations, and the method itself on a toy batch: what cannot work is said now."""
    sequences = args.problems_per_rollout * args.group_size
    for name in ("rollouts", "problems_per_rollout", "group_size", "steps_per_rollout", "tokens_per_micro_batch",
                 "max_tokens", "max_prompt_tokens", "eval_problems", "eval_samples", "keep"):
        if getattr(args, name) < 1:
            refuse(f"--{name} must be 1 or more, not {getattr(args, name)}")
    for name in ("lr", "temperature", "sampler_temperature", "max_grad_norm", "sampler_memory"):
        if not getattr(args, name) > 0:
            refuse(f"--{name} must be above 0, not {getattr(args, name)}")
    for name, value in vars(args).items():
        if isinstance(value, (int, float)) and not 0 <= value < (2**63 if isinstance(value, int) else math.inf) and name != "entropy_coef":
            refuse(f"--{name} must be 0 or more, and finite, not {value}")
    if not math.isfinite(args.entropy_coef):
        refuse(f"--entropy_coef must be finite, not {args.entropy_coef}")
    if args.sampler_memory >= 1:
        refuse(f"--sampler_memory is a share of the GPU's memory, below 1, not {args.sampler_memory}")
    if sequences % args.steps_per_rollout:
        refuse(f"{args.problems_per_rollout} problems x {args.group_size} completions = {sequences} sequences do "
                     f"not divide into --steps_per_rollout {args.steps_per_rollout}")
    if args.overlong_penalty > args.max_tokens:
        refuse(f"--overlong_penalty {args.overlong_penalty} is longer than --max_tokens {args.max_tokens}")
    if args.tis_cap and args.old_logprobs == "sampler":
        refuse("--tis_cap corrects for the sampler a second time: --old_logprobs sampler is already its own")
    if args.sampler == "vllm" and default_kind() != "vllm":
        refuse("--sampler vllm: vllm is not installed here; --sampler transformers needs nothing more")
    for name, package in (("wandb", "wandb"), ("tensorboard", "tensorboard")):
        if getattr(args, name) and not importlib.util.find_spec(package):
            refuse(f"--{name}: the package {package} is not installed (pip install {package})")
    try:
        toy = torch.linspace(-2, -1, 2 * args.group_size).view(2, -1)
        rewards = (torch.arange(2 * args.group_size).view(2, -1) % 3 == 0).float() - 0.5 * bool(args.overlong_penalty)
        group_advantages(method, rewards, dict(entropy=1.0), **hp)
        for only in method.passes:
            policy_loss(method, Tokens(toy, toy, toy, toy < 0, -toy), args.max_tokens, only=only, **hp)
    except ValueError as e:
        refuse(str(e))
    if method.advantage is losses.maxrl and args.overlong_penalty:
        refuse("maxrl divides by a group's mean reward, which --overlong_penalty can bring near 0")
    if args.out and Path(args.out, "metrics.jsonl").exists():
        refuse(f"--out {args.out} already holds a run; give another folder or remove that one")
    if args.model and Path(args.model).exists() and not Path(args.model, "config.json").exists():
        refuse(f"--model {args.model} is not a Hugging Face folder: it has no config.json")


def compute(args):
    """What policy.py needs to know of the flags."""
    return dict(temperature=args.temperature, dtype=args.dtype, budget=args.tokens_per_micro_batch)


def load_data(args):
    """-> the problems to learn from, the held-out ones."""
    try:
        train_set = data.load(args.data, "train", args.data_dir)
        test_set = data.load(args.eval_data or args.data, "test", args.data_dir)[:args.eval_problems] if args.eval_every else []
    except data.DataError as e:
        refuse(str(e))
    if args.eval_every and len(test_set) < args.eval_problems:
        refuse(f"--eval_problems {args.eval_problems}: {args.eval_data or args.data} has {len(test_set)} held-out problems")
    try:
        sandbox.prepare([*test_set, *(train_set if isinstance(train_set, list) else ())], args.allow_unsafe_code)
    except PermissionError as e:
        refuse(str(e))
    return train_set, test_set


def load_tokenizer(args, problems):
    """-> the tokenizer and the ids that end a completion: all of the model that needs no weights. Refuses a model whose
    prompts of `problems` cannot be made, or are too long."""
    try:
        config = AutoConfig.from_pretrained(args.model)
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        eos = eos_ids(args.model, tokenizer)
        lengths = [len(data.encode(tokenizer, p, args.template)) for p in problems]
    except Exception as e:  # what can be wrong with a folder, or with a chat template, has no end
        refuse(f"--model {args.model} cannot be used: {(str(e) or type(e).__name__).splitlines()[0]}")
    if not eos:
        refuse(f"--model {args.model} names no end-of-sequence token, in its tokenizer or its configuration")
    if not min(lengths):
        refuse(f"--model {args.model}: its tokenizer makes nothing of a prompt; are its files complete?")
    if max(lengths) > args.max_prompt_tokens:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens}: a prompt of --data {args.data} has {max(lengths)} tokens")
    places = getattr(config.get_text_config(), "max_position_embeddings", None) or math.inf
    if args.max_prompt_tokens + args.max_tokens > places:
        refuse(f"--max_prompt_tokens {args.max_prompt_tokens} and --max_tokens {args.max_tokens} are more than the model's {places} positions")
    return tokenizer, eos


# ---------------------------------------------------------------------------- one optimizer step

def update(model, optimizer, schedule, batch, method, hp, args, only=every_token):
    """One optimizer step. Returns its metrics; raises FloatingPointError, with nothing changed, where loss or
    gradient is not finite."""
    optimizer.zero_grad(set_to_none=True)
    metrics = backward(model, batch, method, hp, compute(args), args.max_tokens, only, args.entropy_coef,
                       tis_cap=args.tis_cap, kl_coef=args.kl_coef)
    metrics["grad_norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    if not (metrics["loss"].isfinite() and metrics["grad_norm"].isfinite()):
        raise FloatingPointError(f"loss {metrics['loss'].item()}, gradient norm {metrics['grad_norm'].item()}")
    optimizer.step()
    metrics["lr"] = schedule.get_last_lr()[0]
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
        problems = data.batch(train_set, args.problems_per_rollout, args.seed, rollout, attempt)
        prompts = [data.encode(tokenizer, p, args.template) for p in problems]
        if (longest := max(map(len, prompts))) > args.max_prompt_tokens:
            raise RunFailed(f"a prompt of {longest} tokens is longer than --max_prompt_tokens {args.max_prompt_tokens}")
        with log.timed(times, "sample"):
            groups = sampler.sample(prompts, args.group_size, seed=seed_of(args.seed, rollout, attempt),
                                    temperature=args.sampler_temperature, max_tokens=args.max_tokens)
        with log.timed(times, "reward"):
            texts = [[data.decode(tokenizer, c, prompt) for c in g] for prompt, g in zip(prompts, groups)]
            rewards, counted = grade(problems, texts)
        slowest = max(counters["seconds_max"], counted.pop("seconds_max"))
        counters.update(counted, seconds_max=slowest - counters["seconds_max"])
        for group in zip(problems, prompts, groups, texts, rewards):
            (mixed if len(set(group[-1])) > 1 else uniform).append(group)
    groups = mixed + uniform
    return groups[:args.problems_per_rollout], groups[args.problems_per_rollout:], counters


def collect(model, reference, sampler, tokenizer, train_set, args, rollout, times):
    """Samples, grades and scores one rollout -> batch [N = P G], rewards [P, G], what to log of it, some completions."""
    groups, spare, counters = sample_groups(sampler, tokenizer, train_set, args, rollout, times)
    completions = [c for group in groups for c in group[2]]
    batch = make_batch([prompt for _, prompt, cs, _, _ in groups for _ in cs], completions, model.device)
    with log.timed(times, "logp"):
        logprobs, batch.entropy = score(model, batch, compute(args))
        batch.old_logprobs = logprobs if args.old_logprobs == "trainer" else batch.sampler_logprobs
        if reference:
            batch.ref_logprobs, _ = score(reference, batch, compute(args))
    rewards = torch.tensor([group[4] for group in groups], device=model.device)
    metrics = dict(log.outcome(groups + spare), **log.agreement(logprobs, batch),
                   **{f"grader/{k}": v for k, v in counters.items()})
    metrics["policy/entropy"] = batch.entropy[batch.mask].mean().item()
    if args.overlong_penalty:  # DAPO eq. 13: 0, then falling linearly to -1 at the limit
        over = batch.completion_len - (args.max_tokens - args.overlong_penalty)
        rewards = rewards - (over / args.overlong_penalty).clamp(0, 1).view_as(rewards)
    if args.mask_truncated:
        batch.mask &= ~torch.tensor([c.truncated for c in completions], device=model.device)[:, None]
    samples = [dict(prompt=tokenizer.decode(prompt), completion=text, answer=problem["answer"], reward=problem["reward"], score=reward,
                    tokens=len(c.tokens), truncated=c.truncated)
               for problem, prompt, cs, texts, graded in groups[:2] for c, text, reward in list(zip(cs, texts, graded))[:2]]
    return batch, rewards, metrics, samples


# ---------------------------------------------------------------------------- the run's folder

def start_run(args, method, hp):
    """Makes the run's folder, one that no other run has, and writes config.json: flags, versions, commit."""
    out = Path(args.out or f"runs/{args.loss}-{args.steps_per_rollout}-{args.seed}")
    name, taken = out.name, 1
    while True:
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "metrics.jsonl").open("x").close()  # of two runs started together, one gets it
            break
        except FileExistsError:
            if args.out:
                refuse(f"--out {out} already holds a run; give another folder or remove that one")
            out = out.with_name(f"{name}.{(taken := taken + 1)}")
        except OSError as e:
            refuse(f"--out {out} cannot be written: {e.strerror}")
    (out / "config.json").write_text(json.dumps(dict(
        flags=vars(args), method=losses.describe(args.loss, method, hp), hyperparameters=hp, command=sys.argv,
        versions=log.versions(), git=log.commit()), indent=1))
    return out


def save(out, rollout, model, tokenizer, keep, trainer_state):
    """A checkpoint: an ordinary Hugging Face folder, and trainer.pt for what the model is not. Written aside and
    renamed, so that what has the name is whole; the last `keep` stay."""
    folder = out / "checkpoints" / f"rollout_{rollout:06d}"
    aside = folder.with_name("unfinished")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    torch.save(trainer_state, aside / "trainer.pt")
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    for old in sorted(folder.parent.glob("rollout_*"))[:-keep]:
        shutil.rmtree(old.rename(aside))


# ---------------------------------------------------------------------------- the loop

def main(argv=None):
    args, method, hp = parse_args(argv)
    disable_progress_bar()  # of loading and saving: the run's own bar is enough
    train_set, test_set = load_data(args)
    if args.model is None:
        args.model = tiny.base_model()
    tokenizer, eos = load_tokenizer(args, [*test_set, *data.batch(train_set, 64, args.seed, 0)])
    probe = make_batch([[eos[0]]], [Completion(data.encode(tokenizer, train_set[0], args.template)[:64], [], False)])
    try:
        model = load(args.model, eos, probe, compute(args))
    except ValueError as e:
        refuse(f"--model {args.model} {e}")
    out = start_run(args, method, hp)
    sequences = args.problems_per_rollout * args.group_size
    print(f"model    {args.model}\nmethod   {losses.describe(args.loss, method, hp)}\n"
          f"rollout  {args.problems_per_rollout} problems x {args.group_size} completions = {sequences} sequences -> "
          f"{args.steps_per_rollout * len(method.passes)} optimizer steps of {sequences // args.steps_per_rollout}\n"
          f"folder   {out}\n"
          "A loss near 0 is as it should be: advantages sum to about 0. Watch reward and the held-out mean@n.")

    torch.manual_seed(args.seed)
    reference = copy.deepcopy(model).requires_grad_(False) if args.kl_coef else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay, fused=True)
    steps = args.rollouts * args.steps_per_rollout * len(method.passes)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / (args.warmup + 1)) * (
        0.5 + 0.5 * math.cos(math.pi * min(1, step / steps)) if args.schedule == "cosine" else 1))
    sampler = make_sampler(args.sampler, args.model, dtype=args.sampler_dtype, eos=eos, memory=args.sampler_memory,
                           max_length=args.max_prompt_tokens + args.max_tokens)
    head = model.get_output_embeddings().weight
    first_head = head.detach().clone() if args.rank_every else None

    def held_out(rollout):
        scores = evaluate(sampler, tokenizer, test_set, args.eval_samples, seed=seed_of("eval", rollout),
                          temperature=args.temperature, max_tokens=args.max_tokens, template=args.template)
        return {f"eval/{args.eval_data or args.data}/{name}": value for name, value in scores.items()}

    book, bar = log.Log(out, args), tqdm(total=args.rollouts, unit="rollout", dynamic_ncols=True)
    state = {}      # the method's own, FADE's averages
    pending = deque()  # rollouts sampled and not yet learnt from
    totals = Counter()  # optimizer steps, generated tokens, seconds and floating-point operations so far
    sampled, parameters = 0, sum(p.numel() for p in model.parameters())
    if args.eval_every:
        began = time.perf_counter()
        record = dict(rollout=0, **held_out(0), **{"time/rollout": time.perf_counter() - began})
        book.write(record)
        bar.write(log.line(record))

    for rollout in range(1, args.rollouts + 1):
        times = Counter()
        began = time.perf_counter()

        # ---- sample, grade, score: as many rollouts ahead as --rollout_lag says
        while sampled < min(rollout + args.rollout_lag, args.rollouts):
            pending.append(collect(model, reference, sampler, tokenizer, train_set, args, sampled, times))
            sampled += 1
        sampler.sleep()
        batch, rewards, metrics, samples = pending.popleft()

        # ---- advantages
        state["entropy"] = metrics["policy/entropy"]
        advantages = group_advantages(method, rewards, state, **hp)  # [P, G]
        batch.advantages = advantages.view(-1, 1).expand(batch.mask.shape)

        # ---- optimizer steps, each on its own share of the completions
        before = head.detach().clone()
        shuffle = torch.Generator().manual_seed(seed_of("shuffle", args.seed, rollout))
        shares = torch.randperm(sequences, generator=shuffle).to(model.device).chunk(args.steps_per_rollout)
        records = []
        with log.timed(times, "update"):
            for only in method.passes:
                for share in shares:
                    rows = batch.rows(share)
                    if not rows.mask.any():
                        continue  # all of it truncated, under --mask_truncated: counted in optim/skipped
                    try:
                        records.append(update(model, optimizer, schedule, rows, method, hp, args, only))
                    except FloatingPointError as e:
                        torch.save(asdict(rows), out / "failed_batch.pt")
                        raise RunFailed(f"rollout {rollout}, optimizer step {totals['step'] + len(records) + 1}: {e}; "
                                        f"its batch is in {out / 'failed_batch.pt'}") from None

        # ---- weights to the sampler
        with log.timed(times, "sync"):
            sampler.wake()
            sampler.load_weights(model.state_dict())

        # ---- evaluate, log, save
        if args.eval_every and (rollout % args.eval_every == 0 or rollout == args.rollouts):
            with log.timed(times, "eval"):
                metrics.update(held_out(rollout))
        metrics.update(log.advantages(advantages, batch))
        metrics.update({f"adv/{name}": value for name, value in state.items() if name != "entropy"})
        metrics.update({**log.optimizer_steps(records), "policy/entropy": metrics["policy/entropy"]})
        metrics["optim/skipped"] = len(shares) * len(method.passes) - len(records)
        metrics["optim/update_ratio"] = ((head - before).norm() / before.norm()).item()  # of the LM head
        if args.rank_every and rollout % args.rank_every == 0:
            metrics["optim/head_rank1_share"] = log.rank1_share(head.detach() - first_head)
        seconds = time.perf_counter() - began
        read = int((batch.prompt_len + batch.completion_len).sum())  # 2 operations a parameter forward, 4 back
        passes = 2 + 6 * len(method.passes) + 2 * bool(reference)
        totals.update(step=len(records), tokens=metrics["len/sum"], seconds=seconds, flops=passes * parameters * read)
        record = dict(rollout=rollout, **totals, **metrics, **times, **{
            "time/rollout": seconds, "perf/tokens_per_s": metrics["len/sum"] / seconds, "perf/mem_peak_gb": log.memory_gb()})
        book.write(record, samples)
        if rollout == args.rollouts or args.save_every and rollout % args.save_every == 0:
            save(out, rollout, model, tokenizer, args.keep, dict(
                rollout=rollout, sampled=sampled, optimizer=optimizer.state_dict(), schedule=schedule.state_dict(),
                state=state, totals=dict(totals), pending=[(asdict(b), *rest) for b, *rest in pending]))
        bar.write(log.line(record))
        bar.update()

    bar.close()
    sampler.close()
    analyze.curves([out], out / "curves.png")
    print(f"done: {out / 'curves.png'}, {out / 'metrics.jsonl'}, {out / 'checkpoints'}")


if __name__ == "__main__":
    try:
        main()
    except (RunFailed, FloatingPointError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("train.py: interrupted", file=sys.stderr)
        sys.exit(130)
