"""Checks the exercises of this folder: right, or the first input where an answer differs.

    python examples/exercises/check.py        all thirteen
    python examples/exercises/check.py 3 4    exercises 3 and 4

Write your answer into the function of the file, in place of `raise NotImplementedError`. Every
input is a float64 tensor or a plain number; an answer may be wrong by 1e-6 of its size. An exercise
has a process and ten seconds of its own.
"""

import importlib.util
import multiprocessing
import sys
from collections import namedtuple
from copy import deepcopy
from pathlib import Path

import torch

HERE = Path(__file__).parent
SECONDS = 10  # of an exercise
sys.path.insert(0, str(HERE.parent.parent))

import losses  # noqa: E402
import rewards  # noqa: E402
from graders import Unparsed  # noqa: E402
from harness.stats import pass_at_k  # noqa: E402

# answer and cases of a function: a list of tuples of arguments; hint: the usual mistake
Check = namedtuple("Check", "function answer cases hint")


def t(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# two completions of three and two tokens; the ratios of a step, some outside 1 -+ 0.2
OLD = t([-0.1, -1.2, -3.0], [-0.7, -2.3, -9.9])
NEW = t([-0.1, -1.0, -2.5], [-1.2, -2.4, -0.2])
MASK = torch.tensor([[True, True, True], [True, True, False]])
SIGNS = t([1, 1, 1], [-1, -1, -1])
LOGITS = [(t([0, 1, -2])[0], t([0.5, 0, 0])[0]), (t([3, 0])[0], t([3, 0])[0])]
GROUPS = [(t([1, 0, 0, 0]),), (t([1, 1, 0], [0, 0, 0]),), (t([0.3, 0.9], [1, 1]),)]


def with_gradient(f):
    """f with the gradient of its sum with respect to its first argument beside its value."""
    def both(x, *rest):
        x = x.clone().requires_grad_()
        value = f(x, *rest)
        return value, torch.autograd.grad(value.sum(), x)[0]
    return both


def tokens(logprobs, old_logprobs, mask, advantages=None):
    """losses.Tokens of an exercise's arguments."""
    zeros = torch.zeros_like(logprobs)
    return losses.Tokens(logprobs, old_logprobs, zeros if advantages is None else advantages,
                         torch.ones_like(zeros).bool() if mask is None else mask, zeros)


def bernoulli(p, b):
    estimates = (1 - b) * (1 - p), (0 - b) * -p
    mean = p * estimates[0] + (1 - p) * estimates[1]
    return mean, p * (estimates[0] - mean) ** 2 + (1 - p) * (estimates[1] - mean) ** 2


def clip_loss(logprobs, old, advantages, low, high):
    return losses.ppo_clip(tokens(logprobs, old, None, advantages), eps_low=low, eps_high=high)


def kl_estimates(logprobs, ref):
    log_ratio = logprobs - ref
    return log_ratio, log_ratio**2 / 2, (-log_ratio).exp() - 1 + log_ratio


def aggregate(loss, mask, how, max_tokens):
    f = dict(sequence=losses.seq_mean, token=losses.token_mean, constant=losses.constant)[how]
    return f(loss, mask, losses.step_size(mask, max_tokens))


def sequence_ratio(logprobs, old, mask):
    step = tokens(logprobs, old, mask)
    return step.sequence_mean(step.log_ratio).exp().squeeze(1)


def clip_ranges(logprobs, old, mask, bins, base, alpha, most):
    step = tokens(logprobs, old, mask)
    _, ranges = losses.acpo(step, bins=bins, clip_base=base, clip_alpha=alpha, clip_max=most)
    return torch.stack([ranges[f"clip_range/bin{i}"] for i in range(bins)])


def schedules(p, entropy, target, alpha_max, delta_min):
    state = dict(entropy=entropy)
    losses.fade(t([p]).expand(1, 2), state, alpha_max=alpha_max, delta_min=delta_min,
                entropy_target=target, fade_ema=1.0)
    return state["fade_alpha"], state["fade_delta"]


def reverse_kl(logits, teacher_logits):
    log_pi, log_q = logits.log_softmax(0), teacher_logits.log_softmax(0)
    return (log_pi.exp() * (log_pi - log_q)).sum()


def policy_gradient(logits, teacher_logits):
    return -with_gradient(reverse_kl)(logits, teacher_logits)[1]


def reward(completion, answer):
    try:
        return float(rewards.the_answer(completion) == str(answer))
    except Unparsed:
        return 0.0


COMPLETIONS = [
    "<answer>42</answer>", "so it is <answer> 42 </answer>.", "42", "<answer>41 or 42</answer>",
    "<answer>142</answer>", "<answer>41</answer> <answer>42</answer>", "<answer>42",
    "</answer>42<answer>", "</answer> <answer>42</answer>", "<answer>4_2</answer>",
    "<answer>\u0664\u0662</answer>", "<answer></answer> 42", "<answer>42</answer></answer>",
    "<answer>-42</answer>", "<answer>forty-two</answer>"]

EXERCISES = {
    "ex01_baseline": [
        Check("mean_and_variance", bernoulli, [(0.5, 0.0), (0.5, 0.5), (0.9, 0.9), (0.2, 0.7)],
              "the mean does not depend on b; the variance is E[x^2] - E[x]^2 over both answers"),
        Check("centred", lambda r: losses.centred(r, {}), GROUPS,
              "the mean is over G, of each group alone: mean(1, keepdim=True)")],
    "ex02_leave_one_out": [
        Check("leave_one_out", lambda r: losses.leave_one_out(r, {}), GROUPS,
              "the others' mean is (the group's sum - the own reward) / (G - 1)")],
    "ex03_zscore": [
        Check("zscore", lambda r: losses.zscore(r, {}), GROUPS,
              "std of each group with G - 1, and 1e-6 is added to the std, not to the variance"),
        Check("difficulty_weight", lambda p: (p * (1 - p)) ** -0.5, [(0.5,), (0.1,), (0.99,)],
              "the variance of a reward of 0 or 1 is p (1 - p)")],
    "ex04_clip": [
        Check("clip_loss", with_gradient(clip_loss), [
            (OLD, OLD, SIGNS, 0.2, 0.2), (NEW, OLD, SIGNS, 0.2, 0.2), (NEW, OLD, -SIGNS, 0.2, 0.3)],
              "the smaller of the two products, for both signs of A; the loss has a minus")],
    "ex05_kl": [
        Check("kl_estimates", kl_estimates, [(OLD, OLD), (OLD, NEW), (NEW, OLD)],
              "r is pi_ref / pi: the sampled policy's probability is below the line")],
    "ex06_aggregate": [
        Check("aggregate", aggregate, [
            (NEW, MASK, how, 4) for how in ("sequence", "token", "constant")],
              "the last place of the second completion is padding: it counts nowhere")],
    "ex07_pass_at_k": [
        Check("pass_at_k", pass_at_k, [(4, 1, 1), (4, 1, 2), (16, 4, 8), (8, 7, 2), (8, 0, 8)],
              "1 - C(n - c, k) / C(n, k); with fewer than k failures it is 1")],
    "ex08_gspo": [
        Check("sequence_ratio", with_gradient(sequence_ratio), [
            (OLD, OLD, MASK), (NEW, OLD, MASK)],
              "the mean of the logarithms over the completion's own tokens, then exp")],
    "ex09_acpo": [
        Check("clip_ranges", clip_ranges, [
            (NEW, OLD, MASK, 1, 0.2, 3.0, 3.0), (NEW, OLD, MASK, 5, 0.2, 3.0, 3.0),
            (NEW, OLD, MASK, 2, 0.2, 3.0, 0.5)],
              "bins of pi = exp(logprobs), not of pi_old; a std of ratios, without padding")],
    "ex10_ess": [
        Check("effective_sample_size", lambda *x: losses.effective_sample_size(tokens(*x)), [
            (OLD, OLD, MASK), (NEW, OLD, MASK)],
              "divide by the number of tokens; padding is none")],
    "ex11_fade": [
        Check("schedules", schedules, [
            (0.5, 1.0, 0.5, 3.0, 0.3), (0.0, 1.0, 0.5, 3.0, 0.3), (0.9, 1.0, 0.5, 3.0, 0.3),
            (0.4, 0.2, 0.5, 3.0, 0.3), (0.4, 0.2, 1.5, 2.0, 0.3)],
              "both are clipped at both ends; p = 0 has alpha_max")],
    "ex12_reward": [
        Check("reward", reward, [(text, 42) for text in COMPLETIONS],
              "count both tags, and compare the whole text between them")],
    "ex13_distillation": [
        Check("reverse_kl", with_gradient(reverse_kl), LOGITS,
              "the mean is over pi, the student: KL(q | pi) is another number"),
        Check("policy_gradient", policy_gradient, LOGITS,
              "d log pi(a) / d logit j is [a = j] - pi(j); A is not differentiated")],
}


def solution(name):
    """The module of an exercise's file."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def same(value, expected):
    """Are two numbers, tensors, or tuples of them equal to 1e-6, and of one shape?"""
    if isinstance(expected, tuple):
        return (isinstance(value, (tuple, list)) and len(value) == len(expected)
                and all(map(same, value, expected)))
    value, expected = (torch.as_tensor(x, dtype=torch.float64) for x in (value, expected))
    return value.shape == expected.shape and torch.allclose(value, expected, 1e-6, 1e-9)


def verdict(check, module):
    """-> None where all cases are right, else a text."""
    function = getattr(module, check.function)
    answer = check.answer
    if answer.__qualname__.startswith("with_gradient"):
        function = with_gradient(function)
    for arguments in check.cases:
        expected = answer(*arguments)
        try:
            value = function(*deepcopy(arguments))  # it may write into them
            if same(value, expected):
                continue
        except NotImplementedError:
            return "not done yet"
        except (Exception, SystemExit) as error:  # a student's code: what it raises is shown
            value = f"{type(error).__name__}: {error}"
        shown = ", ".join(map(repr, arguments))
        return (f"wrong\n  {check.function}({shown})\n  expected {expected!r}\n  got      {value!r}"
                f"\n  hint: {check.hint}")
    return None


def judge(name):
    """-> the lines of an exercise, and whether all of it is right."""
    torch.set_printoptions(precision=9)
    try:
        module = solution(name)
    except (Exception, SystemExit) as error:  # a student's file, which need not be Python
        return [f"{name}: {type(error).__name__}: {error}"], False
    faults = [(check.function, verdict(check, module)) for check in EXERCISES[name]]
    return ([f"{name}.{function}: {fault or 'right'}" for function, fault in faults],
            not any(fault for _, fault in faults))


def main(numbers):
    if {"-h", "--help"} & set(numbers):
        print(__doc__)
        return 0
    names = [name for i, name in enumerate(EXERCISES, 1) if not numbers or str(i) in numbers]
    if len(names) < len(set(numbers)):
        sys.exit(f"check.py: exercises are 1 to {len(EXERCISES)}, not {' '.join(numbers)}")
    all_right = True
    for name in names:
        with multiprocessing.get_context("fork").Pool(1) as pool:
            try:
                lines, right = pool.apply_async(judge, [name]).get(SECONDS)
            except multiprocessing.TimeoutError:
                lines, right = [f"{name}: no end after {SECONDS} seconds"], False
        print(*lines, sep="\n", flush=True)
        all_right &= right
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
