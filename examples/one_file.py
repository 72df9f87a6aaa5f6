"""RL with verifiable rewards in one file: the algorithm of train.py without its engine.

    python examples/one_file.py                GRPO on the embedded base, 80 s on two CPU cores
    python examples/one_file.py --loss fade    any row of losses.METHODS but opd

A rollout is P problems with G completions each. The policy samples them, a verifier grades them,
and the policy learns from them in S optimizer steps; the updated policy samples the next rollout.
tests/test_one_file.py compares log probabilities, losses and weights with those of train.py.

Shapes: N = P G completions, T tokens of a completion, L tokens of a prompt and its completion.
"""

import argparse
import sys
import time
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

if __name__ == "__main__":
    sys.path[0] += "/.."  # imports begin at the project's folder
import data
from losses import METHODS, Tokens, group_advantages, policy_loss
from rewards import grade

MAX_TOKENS = 16  # the base's answers have about ten
HELD_OUT = 256   # problems of the evaluation, with 16 completions each


# ---------------------------------------------------------------------------- sample and grade

class Completions(NamedTuple):
    """The completions of P problems, problem after problem. Prompts are padded on the left and
    completions on the right: all completions begin in the same column."""

    ids: torch.Tensor             # [N, L]
    attention_mask: torch.Tensor  # [N, L] 0 in padding
    mask: torch.Tensor            # [N, T] bool, the completion tokens
    logprobs: torch.Tensor        # [N, T] of the distribution that each token was drawn from


@torch.no_grad()
def sample(model, tokenizer, problems, group_size, greedy=False):
    """`group_size` completions of each problem, drawn from the policy itself: temperature 1, no
    top-k, no top-p. The gradient is then of the distribution sampled. greedy: for tests."""
    prompts = [problem["prompt"] for problem in problems for _ in range(group_size)]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=MAX_TOKENS, do_sample=not greedy, temperature=1.0, top_k=0,
        top_p=1.0, return_dict_in_generate=True, output_logits=True)
    tokens = output.sequences[:, inputs.input_ids.shape[1]:]
    log_pi = torch.stack(output.logits, 1).log_softmax(-1)
    # a token counts if no end-of-sequence token is before it: the first end-of-sequence token
    # counts, too. It is an action like the others, and the policy learns when to stop
    ends = (tokens == tokenizer.eos_token_id).long()
    mask = ends.cumsum(1) - ends == 0
    return Completions(output.sequences, torch.cat([inputs.attention_mask, mask.long()], 1), mask,
                       log_pi.gather(-1, tokens[..., None])[..., 0])


def texts_of(tokenizer, completions):
    """The N completions as texts, without the end-of-sequence token."""
    tokens = completions.ids[:, -completions.mask.shape[1]:]
    inside = completions.mask & (tokens != tokenizer.eos_token_id)
    return [tokenizer.decode(row[keep]) for row, keep in zip(tokens, inside)]


def rewards_of(tokenizer, problems, completions):
    """The rewards [P, G]: the verifier of each problem reads the text, 1 is a correct answer."""
    texts = texts_of(tokenizer, completions)
    group_size = len(texts) // len(problems)
    groups = [texts[i:i + group_size] for i in range(0, len(texts), group_size)]
    rewards = [[x.reward for x in results] for results in grade(problems, groups)]
    return torch.tensor(rewards)


# ---------------------------------------------------------------------------- score

def logprobs_and_entropy(model, ids, attention_mask, length):
    """log pi of the last `length` tokens of each sequence, and the entropy in nats: [N, T]."""
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)  # a prompt begins at 0
    logits = model(input_ids=ids, attention_mask=attention_mask, position_ids=positions).logits
    log_pi = logits[:, -length - 1:-1].log_softmax(-1)  # the logits at a token are of the next
    logprobs = log_pi.gather(-1, ids[:, -length:, None])[..., 0]
    return logprobs, -(log_pi.exp() * log_pi).sum(-1)


@torch.no_grad()
def score(model, method, completions, rewards, state):
    """The rollout as Tokens [N, T], before the update: log pi is log pi_old.

    The ratio's denominator is this forward pass's log probability: at the first step the ratio is
    then 1, however the sampler rounds. Methods that correct for the sampler's distribution (p3o,
    opsm) take the sampler's log probability instead."""
    ids, attention_mask, mask, sampler_logprobs = completions
    logprobs, entropy = logprobs_and_entropy(model, ids, attention_mask, mask.shape[1])
    old_logprobs = sampler_logprobs if method.old_logprobs == "sampler" else logprobs
    # state outlives the rollout: fade reads the entropy there and keeps its moving averages there
    state["entropy"] = entropy[mask].mean().item()
    advantages = group_advantages(method, rewards, state)  # [P, G]
    # the reward is of the whole completion: all of its tokens have the same advantage
    advantages = advantages.reshape(-1, 1).expand(mask.shape)
    group = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])[:, None]
    return Tokens(old_logprobs, old_logprobs, advantages, mask, entropy, sampler_logprobs,
                  group=group.expand(mask.shape))


# ---------------------------------------------------------------------------- update

def loss_of(model, method, completions, scored, weight, rows):
    """The method's loss on a minibatch: rows of the rollout, an index tensor. A new forward pass
    gives the present log probabilities, with a gradient, and entropies; the rest is as scored."""
    logprobs, entropy = logprobs_and_entropy(
        model, completions.ids[rows], completions.attention_mask[rows], scored.mask.shape[1])
    tokens = Tokens(logprobs, scored.old_logprobs[rows], scored.advantages[rows],
                    scored.mask[rows], entropy.detach(), scored.sampler_logprobs[rows],
                    weight=weight[rows], group=scored.group[rows])
    return policy_loss(method, tokens, MAX_TOKENS)


def step(model, optimizer, loss):
    """One step of AdamW on the gradient of a loss. A gradient longer than 1 is scaled down to 1, so
    that a few tokens with a large ratio do not decide the step."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def update(model, optimizer, method, completions, scored, minibatches):
    """An optimizer step on each minibatch of the rollout. -> the losses before each step

    After the first step the policy is another than the one that sampled: the ratios leave 1, and
    the objective's clipping matters. Most methods have one pass over the rollout, with weight 1 for
    every token; ar_lopti has two, for unlikely tokens and then for likely ones."""
    losses = []
    for weigh in method.passes:
        weight = method.call(weigh, scored)  # with the row's hyperparameters
        for rows in minibatches:
            loss = loss_of(model, method, completions, scored, weight, rows)
            step(model, optimizer, loss)
            losses.append(loss.item())
    return losses


# ---------------------------------------------------------------------------- the run

def evaluate(model, tokenizer, problems, seed):
    """-> mean@16, the fraction of correct completions, and pass@16, the fraction of problems with a
    correct one among 16. Every evaluation has the same random numbers; training's stay apart."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        rewards = rewards_of(tokenizer, problems, sample(model, tokenizer, problems, 16))
    return rewards.mean().item(), (rewards == 1).any(1).float().mean().item()


def parse_args(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [name for name in METHODS if name != "opd"]  # whose teacher is a second model
    parser.add_argument("--loss", default="grpo", choices=names, metavar="NAME",
                        help=f"the method: {', '.join(names)}")
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--problems", type=int, default=64, help="problems of a rollout, P")
    parser.add_argument("--group", type=int, default=16, help="completions of each, G")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps on a rollout, S")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    torch.manual_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(data.BASE)
    model = AutoModelForCausalLM.from_pretrained(data.BASE, dtype=torch.float32)
    train_set, test_set = data.load("countdown", "train"), data.load("countdown", "test")[:HELD_OUT]
    method, state = METHODS[args.loss], {}
    # weight decay would pull the weights to 0, away from the base
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)

    scores = "held out: mean@16 {:.3f}  pass@16 {:.3f}"
    print(scores.format(*evaluate(model, tokenizer, test_set, args.seed)), flush=True)
    for rollout in range(1, args.rollouts + 1):
        start = time.time()
        problems = data.batch(train_set, args.problems, args.seed, rollout)
        completions = sample(model, tokenizer, problems, args.group)
        rewards = rewards_of(tokenizer, problems, completions)
        scored = score(model, method, completions, rewards, state)
        minibatches = torch.randperm(len(completions.ids)).chunk(args.steps)
        losses = update(model, optimizer, method, completions, scored, minibatches)
        print(f"{rollout:3d}/{args.rollouts}  reward {rewards.mean():.3f}  "
              f"entropy {state['entropy']:.3f}  length {completions.mask.sum(1).float().mean():.1f}"
              f"  loss {sum(losses) / len(losses):+.4f}  {time.time() - start:.1f} s", flush=True)
    print(scores.format(*evaluate(model, tokenizer, test_set, args.seed)))


if __name__ == "__main__":
    main()
