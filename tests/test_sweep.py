"""./run_all.sh sweep: its commands, and what it says of runs that are there."""

import json
import shlex
import subprocess
from types import SimpleNamespace

import pytest

import train
from helpers import refused, write_rows
from study import sweep

METHOD = "fade --alpha_max 2"
RATES = ["1e-5", "2e-5", "4e-5"]
# held-out scores at the rates; the best of these, and scores of the seeds 1, 2, 3 there
SCORES = {METHOD: ([0.2, 0.4, 0.3], "2e-5", [0.5, 0.3, 0.4]),
          "grpo": ([0.1, 0.2, 0.3], "4e-5", [0.2, 0.2, 0.2])}
FLAGS = [METHOD, "--rates", "1e-5,2e-5,4e-5", "--seeds", "3", "--group_size", "8", "--out"]


def commands(capsys, *flags):
    sweep.main([*map(str, flags), "--dry_run"])
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_the_commands_are_those_of_paired_runs(tmp_path, capsys):
    lines = commands(capsys, *FLAGS, tmp_path)
    assert all((*line[:2], line[-1]) == ("python", "train.py", "--resume") for line in lines)
    parsed = [train.parse_args([text.replace("BEST", "1") for text in line[2:-1]])[0]
              for line in lines]
    assert [(args.loss, args.lr, args.seed) for args in parsed] == [
        (loss, lr, 0) for lr in (1e-5, 2e-5, 4e-5) for loss in ("fade", "grpo")] + [
        (loss, 1.0, seed) for seed in (1, 2, 3) for loss in ("fade", "grpo")]
    assert {(args.group_size, args.rollouts, args.eval_every) for args in parsed} == {(8, 16, 16)}
    assert len({args.out for args in parsed}) == 12
    assert [args.alpha_max for args in parsed if args.loss == "fade"] == [2] * 6
    rates = [train.parse_args(line[2:-1])[0].lr for line in commands(capsys, "fade")[:8:2]]
    assert rates == [1.7e-5, 5e-5, 1.5e-4, 4.5e-4]  # about the recipe's


def test_the_best_rates_are_compared_over_fresh_seeds(tmp_path, capsys, monkeypatch):
    args = sweep.parse_args([*FLAGS, str(tmp_path)])
    for method, (searched, best, fresh) in SCORES.items():
        for rate, seed, score in zip(RATES + [best] * 3, (0, 0, 0, 1, 2, 3), searched + fresh):
            folder = sweep.command(args, method, rate, seed)[1]
            folder.mkdir(parents=True)
            config = dict(flags=dict(loss=method, seed=seed))
            (folder / "config.json").write_text(json.dumps(config))
            record = {"rollout": 25, "reward/mean": score, "eval/countdown/mean@4": score}
            write_rows(folder / "metrics.jsonl", [record])
    ran, of_other_code = [], set()

    def trains(argv, **options):  # it finds these runs finished
        ran.append(argv)
        code = 2 * (argv[argv.index("--lr") + 1] in of_other_code and "--force" not in argv)
        return SimpleNamespace(returncode=code, stderr="x\ntrain.py: losses.py changed in raw\n",
                               stdout="resuming, but x changed\n" * ("--force" in argv))
    monkeypatch.setattr(subprocess, "run", trains)
    sweep.main([*FLAGS, str(tmp_path)])
    assert len(ran) == 12 and all("--resume" in argv for argv in ran)
    said = capsys.readouterr().out
    assert "grpo: 4e-5 is at the end of the --rates" in said and "fade: 2e-5" not in said
    # differences 0.3, 0.1, 0.2: standard error 0.1 / sqrt(3), Student's 4.303 of them
    assert "difference +0.200, 95% interval -0.048 to +0.448 over 3 seeds" in said
    assert f"{METHOD} 0.400, grpo 0.200: held-out mean@n after 16 rollouts" in said
    assert (tmp_path / "sweep.png").stat().st_size > 10_000

    of_other_code.add("1e-5")
    with pytest.raises(SystemExit, match="runs have failed; the same command"):
        sweep.main([*FLAGS, str(tmp_path)])
    assert "grpo, lr 1e-5, seed 0: train.py: losses.py changed in raw" in capsys.readouterr().out
    sweep.main([*FLAGS, str(tmp_path), "--force"])
    said = capsys.readouterr().out
    assert "difference +0.200" in said and said.count(": resuming, but x changed") == 12


@pytest.mark.parametrize("flags, words", [
    (["grpo"], "sweep: grpo is the --baseline, too"),
    (["fade", "--lr", "1"], "--lr is no flag for all runs alike; the sweep has --rates"),
    (["fade", "--seeds", "1"], "--seeds"),
    (["fade", "--rates", "1,x"], "--lr: invalid float value: 'x'"),
    (["fade --alpha 2"], "--alpha is a flag of power"), (["fad"], "did you mean fade?")])
def test_bad_flags_are_one_sentence_before_any_run(flags, words, tmp_path, capsys):
    assert words in refused(capsys, sweep.main, *flags, "--out", tmp_path)
    assert not list(tmp_path.iterdir())
