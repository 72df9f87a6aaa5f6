"""Problems, tokenizer, sampler and trainer, as flags name them; what cannot be used is refused."""

import re
from functools import partial
from pathlib import Path

import torch

import data
from data.prompts import encode, template_kwargs
from data.sources import reach, reason
from engine.parallel import say
from engine.sampler import make_sampler
from harness import checkpoint, files
from harness.failures import refuse, refusing, room_for
from losses import require
from rewards import announce


def load_data(args):
    """-> the problems to learn from, those held out, and the checksums of problems and weights.
    Refuses what training of a resumed run depends on and what has changed."""
    held_out = args.eval_data or args.data
    try:
        test_set = data.load(held_out, "test", args.data_dir) if args.eval_every else []
        train_set = data.load(args.data, "train", args.data_dir)
        rows = train_set if isinstance(train_set, list) else []  # the others are made one by one
        announce([*test_set, *rows], args.allow_unsafe_code)
    except (data.DataError, PermissionError) as e:
        other = (": --eval_data NAME holds out another's, --eval_every 0 none"
                 if "no test split" in str(e) else "")
        refuse(re.sub(f"--data (?={re.escape(str(args.eval_data))}[: ])", "--eval_data ",
                      f"{e}{other}"))
    learnt = {*map(data.cluster, rows)}
    if both := sum(data.cluster(p) in learnt for p in test_set):
        say(f"{both} of the {len(test_set)} held-out problems of {held_out} are training "
            "problems, too, and say little of others; --eval_data names other problems")
    roots = args.roots + [f"REWARDS[{p['verifier']!r}]" for p in (train_set[0], *rows, *test_set)]
    known = {"problems": files.checksum_of_problems(rows),
             "held-out problems": test_set and files.checksum_of_problems(test_set),
             "weights of --model": files.checksum_of_weights(args.model),
             "weights of --teacher": args.teacher and files.checksum_of_weights(args.teacher)}
    checksums = {name: x for name, x in known.items() if x}
    return train_set, test_set, checkpoint.compare_with_saved(args, checksums, roots)


def read_tokenizer(model, problems=(), template=None, variables=None, longest=0):
    """-> the tokenizer, with --template_kwargs (variables) in its chat template, the ids that end a
    completion, and the number of tokens of each problem's prompt, which is encoded again when it is
    sampled. longest: tokens of a prompt and its completion. Raises ValueError for a model that
    cannot make the prompts or take such lengths."""
    from transformers import AutoTokenizer  # takes seconds: flags are refused first

    from engine.loading import eos_ids, text_config
    try:
        reach(model)
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        config, _ = text_config(model)
        eos = eos_ids(model, tokenizer)
    except Exception as e:  # a folder's files, and the Hub, may raise anything
        where = ("cannot be used" if Path(model).exists()
                 else "is no folder here, and as an id of the Hub it cannot be used")
        raise ValueError(f"--model {model} {where}: {reason(e)}") from None
    options, chat = template_kwargs(variables, template), tokenizer.chat_template
    for name in options:
        require(re.search(rf"\b{re.escape(name)}\b", str(chat)), "--template_kwargs: the chat "
                f"template of --model {model} has no variable {name} to be set")
    tokenizer.apply_chat_template = partial(tokenizer.apply_chat_template, **options)
    require(chat or template not in ("chat", "qwen_boxed"), f"--template {template}: --model "
            f"{model} has no chat template; --template none leaves prompts bare")
    prompts = []
    for problem in problems:
        try:
            prompts.append(encode(tokenizer, problem, template))
        except Exception as e:  # a chat template is a program, which may raise anything
            raise ValueError(f"--model {model}: its tokenizer cannot encode the prompt of problem "
                             f"{problem['id']} ({reason(e)}); --template has others") from None
    # transformers makes a tokenizer without words of a folder without one
    require(all(prompts) and {*tokenizer.get_vocab()} - {*tokenizer.all_special_tokens},
            f"--model {model} has no tokenizer that makes tokens of a prompt; are its files "
            "complete?")
    require(eos, f"--model {model} names no end-of-sequence token, in its tokenizer or its "
            "configuration")
    largest = max(map(max, prompts), default=0)
    require(largest < config.vocab_size, f"--model {model} has a token {largest} in its tokenizer, "
            f"and {config.vocab_size} in its embedding")
    positions = getattr(config, "max_position_embeddings", None) or longest
    require(longest <= positions, f"--max_prompt_tokens and --max_tokens are {longest} in sum, and "
            f"the model has {positions} positions")
    return tokenizer, eos, list(map(len, prompts))


def load_tokenizer(args, train_set, test_set):
    """-> the tokenizer, the ids that end a completion, the problems to learn from, and the first
    --eval_problems held out; of prompts with at most --max_prompt_tokens. Refuses a model that
    cannot make prompts, and a limit that leaves none, or not all of 64 that are made one by one."""
    from transformers.utils.logging import disable_progress_bar
    disable_progress_bar()  # of loading and saving
    made, limit, kept = not isinstance(train_set, list), args.max_prompt_tokens, []
    rows = data.batch(train_set, 64, args.seed, 1) if made else train_set
    with refusing():
        tokenizer, eos, lengths = read_tokenizer(args.model, [*rows, *test_set], args.template,
                                                 args.template_kwargs, limit + args.max_tokens)
    held_out = f"--eval_data {args.eval_data}" if args.eval_data else f"--data {args.data}, test"
    for source, problems, its in ((f"--data {args.data}", rows, lengths[:len(rows)]),
                                  (held_out, test_set, lengths[len(rows):])):
        short = [problem for problem, n in zip(problems, its) if n <= limit]
        if left_out := len(problems) - len(short):
            if not short or (made and problems is rows):
                refuse(f"--max_prompt_tokens {limit}: a prompt of {source} has {max(its)} tokens: "
                       "raise it")
            say(f"{source}: left out {left_out} of {len(problems)} problems, their prompts are "
                f"longer than --max_prompt_tokens {limit}")
        kept.append(short)
    return tokenizer, eos, train_set if made else kept[0], kept[1][:args.eval_problems]


def load_trainer(args, method, tokenizer, eos, problem):
    """-> the Trainer, with the last checkpoint's weights; its adapters and the rest come with
    checkpoint.restore. Refuses a model that it cannot train."""
    from engine import loading
    from engine.trainer import Trainer, lr_factor
    torch.manual_seed(args.seed)  # LoRA's first adapters are drawn
    probe = loading.probe_batch(encode(tokenizer, problem, args.template)[:64], eos[0])
    compute = loading.Compute(
        longest=args.max_prompt_tokens + args.max_tokens, budget=args.tokens_per_micro_batch,
        temperature=args.temperature, dtype=args.dtype, head_dtype=args.head_dtype,
        share_prompts=args.share_prompts, activation_checkpointing=args.activation_checkpointing,
        offload=args.offload, lora_rank=args.lora_rank, lora_alpha=args.lora_alpha)
    steps = args.rollouts * args.steps_per_rollout * len(method.passes)  # a pass takes all steps
    if args.teacher:
        with refusing("--teacher, as "):
            vocabulary = read_tokenizer(args.teacher)[0].get_vocab()
        if vocabulary != tokenizer.get_vocab():
            refuse(f"--teacher {args.teacher} has another tokenizer than --model {args.model}: it "
                   "scores the model's tokens, by their ids")
    newest = not args.lora_rank and args.earlier.checkpoint  # adapters have the model's weights
    subject = f"--resume: the newest checkpoint, {newest}," if newest else f"--model {args.model}"
    teacher = f" or --teacher {args.teacher}" * bool(args.teacher)
    with refusing(f"{subject}{teacher} "), room_for("loading"):
        return Trainer.load(
            args.model, eos, probe, method, compute, weights=args.earlier.checkpoint,
            lr=args.lr, factor=partial(lr_factor, args.warmup, args.schedule, steps),
            teacher=args.teacher, weight_decay=args.weight_decay, max_tokens=args.max_tokens,
            max_grad_norm=args.max_grad_norm, kl_coef=args.kl_coef,
            kl_unbiased=args.kl_unbiased, entropy_coef=args.entropy_coef)


def load_sampler(args, trainer, eos):
    """-> a sampler with the trainer's weights. Refuses a model that it cannot sample or load."""
    adapters = (args.lora_rank, args.lora_alpha) if args.lora_rank else None
    float8 = args.sampler_dtype == "float8"  # of the linear layers; the rest is in --dtype
    with refusing(f"--model {args.model} "), room_for("loading"):
        sampler = make_sampler(
            args.sampler, args.model, dtype=args.dtype if float8 else args.sampler_dtype,
            float8=float8, head_dtype=args.head_dtype, eos=eos, stop=args.stop, adapters=adapters,
            max_length=args.max_prompt_tokens + args.max_tokens, max_num_seqs=args.max_num_seqs,
            gpu_memory_utilization=args.gpu_memory_utilization, tp=args.tp)
        sampler.load_weights(trainer.weights(sampler.merged))
    return sampler
