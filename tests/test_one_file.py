"""examples/one_file.py computes the numbers of train.py: the engine is exact, for every method."""

import copy
import sys
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

import data
import losses
import train
from conftest import ROOT, between
from data.prompts import encode
from engine import policy
from engine.sampler import Completion, make_sampler
from engine.trainer import Trainer
from examples import one_file
from losses import METHODS
from ranks import EXACT_NORMS
from rollout import Group, sample_on_engines
from test_style import imports_of

P, G, S = 3, 6, 3
ROLLOUTS = 2  # the second has another state, and ratios against other weights
LR = 3e-3
# the second group has no advantage in most rows of METHODS: train.py leaves its completions out
REWARDS = torch.tensor([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).float()


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@torch.no_grad()
def scores_of(model, ids, attention_mask, mask, *_):
    """-> log probabilities and entropies of completions"""
    return one_file.logprobs_and_entropy(model, ids, attention_mask, mask.shape[1])


@pytest.fixture(scope="module")
def problems():
    return data.load("countdown", "test")[:P]


@pytest.fixture(scope="module")
def model(small):
    with EXACT_NORMS:  # the same sums in any order to 1e-15, which float32 would not give
        return load(small(), torch.float64)


@pytest.fixture(scope="module")
def completions(base, model, tokenizer, problems):
    """Completions of the base, cut to uneven lengths, with noise in the sampler's probabilities."""
    torch.manual_seed(0)
    ids, attention_mask, mask, _ = one_file.sample(load(base), tokenizer, problems, G)
    length = mask.shape[1]
    mask &= torch.arange(length) < 1 + 7 * torch.arange(P * G)[:, None] % 11
    attention_mask[:, -length:] *= mask
    ids[:, -length:] *= mask
    assert len(mask.sum(1).unique()) > 5 and mask.sum(1).max() == length
    logprobs = scores_of(model, ids, attention_mask, mask)[0]
    logprobs += 0.3 * torch.randn(logprobs.shape)
    # float32, as train.py keeps the sampler's
    return one_file.Completions(ids, attention_mask, mask, logprobs.float())


def numbers_of(rollout, scored, told):
    """-> {quantity: tensor} of a rollout: its Tokens or Batch, and the losses of its steps."""
    fields = {f"{name} {rollout}": getattr(scored, name)[scored.mask]
              for name in ("old_logprobs", "entropy", "advantages")}
    return {**fields, f"losses {rollout}": torch.tensor(told, dtype=torch.float64)}


def weights_of(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def by_one_file(model, method, completions):
    """-> {quantity: tensor} of ROLLOUTS rollouts, each of the same completions."""
    model, state, found = copy.deepcopy(model), {}, {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    for rollout in range(ROLLOUTS):
        scored = one_file.score(model, method, completions, REWARDS, state)
        shares = policy.shuffled_shares(P * G, S, 0, rollout)
        told = one_file.update(model, optimizer, method, completions, scored, shares)
        found.update(numbers_of(rollout, scored, told))
    return {**found, "weights": weights_of(model)}


def groups_of(completions, tokenizer, problems):
    """The same completions as train.py has them."""
    rows = zip(completions.ids[:, -completions.mask.shape[1]:], completions.mask,
               completions.logprobs, strict=True)
    found = [Completion(ids[mask].tolist(), logprobs[mask].tolist(),
                        ids[mask][-1] != tokenizer.eos_token_id) for ids, mask, logprobs in rows]
    return [Group(problem, encode(tokenizer, problem), found[i * G:i * G + G], [""] * G,
                       REWARDS[i].tolist(), [None] * G) for i, problem in enumerate(problems)]


def by_train(model, name, method, groups):
    """The same from train.py's functions, with prompts shared and steps cut into micro-batches."""
    args, _ = train.parse_args(f"--loss {name} --lr {LR} --steps_per_rollout {S} --group_size {G} "
                               f"--problems_per_rollout {P}".split())
    assert args.max_tokens == one_file.MAX_TOKENS and args.max_grad_norm == 1
    chosen, state, found = policy.Policy(copy.deepcopy(model), budget=60, layout="shared"), {}, {}
    trainer = Trainer(chosen, method, max_tokens=args.max_tokens, lr=args.lr,
                      weight_decay=args.weight_decay)
    for rollout in range(ROLLOUTS):
        batch, metrics = train.score(trainer, groups, args)
        state["entropy"] = metrics["policy/entropy"]
        advantages = losses.group_advantages(method, REWARDS, state)
        batch.advantages = advantages.reshape(-1, 1).expand(batch.mask.shape)
        told = [trainer.step(minibatch)["loss"].item()
                for _, minibatch in policy.minibatches(batch, method, S, 0, rollout)]
        found.update(numbers_of(rollout, batch, told))
    return {**found, "weights": weights_of(chosen)}


@pytest.mark.parametrize("name", [name for name in METHODS if name != "opd"])  # has a teacher
def test_the_numbers_are_those_of_train(name, model, completions, tokenizer, problems,
                                        monkeypatch):
    """Both passes of ar_lopti have tokens; the entropy reaches fade's delta, else clipped to 1.
    AdamW's eps is large: at its default a gradient as small makes a step of rounding errors."""
    monkeypatch.setattr(torch.optim, "AdamW", partial(torch.optim.AdamW, eps=1e-4))
    method = METHODS[name]
    logprobs, entropy = (x[completions.mask] for x in scores_of(model, *completions))
    values = dict(prob_split=between(logprobs.exp()), entropy_target=entropy.mean().item() + 0.3)
    method = method.bind(**{flag: x for flag, x in values.items() if flag in method.flags})
    found = by_one_file(model, method, completions)
    wanted = by_train(model, name, method, groups_of(completions, tokenizer, problems))
    assert found.keys() == wanted.keys()
    assert (wanted["weights"] - weights_of(model)).abs().max() > LR
    for quantity, x in wanted.items():
        assert found[quantity].shape == x.shape, quantity
        assert (found[quantity] - x).abs().max() <= 1e-9, quantity


def test_greedy_completions_are_those_of_the_sampler(base, tokenizer):
    problems = data.load("countdown", "test")[:32]
    completions = one_file.sample(load(base), tokenizer, problems, 1, greedy=True)
    sampler = make_sampler("transformers", base, dtype="float32", max_length=64,
                           eos=[tokenizer.eos_token_id])
    groups = sample_on_engines(sampler, tokenizer, problems, None, (0,), n=1, temperature=0,
                               max_tokens=one_file.MAX_TOKENS)
    for i, group in enumerate(groups):
        tokens = completions.ids[i, -completions.mask.shape[1]:][completions.mask[i]]
        assert tokens.tolist() == group.completions[0].tokens
        assert completions.logprobs[i][completions.mask[i]].tolist() == pytest.approx(
            group.completions[0].logprobs, abs=1e-4)
    assert one_file.texts_of(tokenizer, completions) == [group.texts[0] for group in groups]
    rewards = one_file.rewards_of(tokenizer, problems, completions)
    assert rewards.tolist() == [group.rewards for group in groups] and 0 < rewards.mean() < 1


def test_the_samplers_log_probabilities_are_the_policys(base, tokenizer, problems):
    """The draw is at temperature 1. Padded prompts are among those that train.py shares above."""
    torch.manual_seed(0)
    model = load(base)
    ids, attention_mask, mask, logprobs = sampled = one_file.sample(model, tokenizer, problems, G)
    assert (logprobs - scores_of(model, *sampled)[0])[mask].abs().max() <= 1e-5
    assert len(ids.unique(dim=0)) > P and attention_mask[:, 0].unique().tolist() == [0, 1]


@pytest.mark.parametrize("name", ["grpo", "ar_lopti"])
def test_it_runs(name, monkeypatch, capsys):
    monkeypatch.setattr(one_file, "HELD_OUT", 8)
    one_file.main(["--loss", name, "--rollouts", "2", "--problems", "8", "--group", "8",
                   "--steps", "2", "--lr", "1e-3"])
    before, first, second, after = capsys.readouterr().out.splitlines()
    assert before.startswith("held out: mean@16 0.") and before[:9] == after[:9] and before != after
    assert first.startswith("  1/2  reward ") and second.startswith("  2/2  reward ")


def test_it_is_one_short_file():
    path = ROOT / "examples" / "one_file.py"
    assert len(path.read_text().splitlines()) <= 200
    others = {name.split(".")[0] for name in imports_of(path)} - set(sys.stdlib_module_names)
    assert others == {"torch", "transformers", "losses", "data", "rewards"}
