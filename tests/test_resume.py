"""Resuming: killed anywhere, a run ends as if it had not been; damage and changes are said."""

import ast
import copy
import fcntl
import json
import os
import pathlib
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import helpers
import train
from analysis.__main__ import main as analyse
from anatomy.rollout import open_rollout
from anatomy.tokens import walked
from conftest import ROOT
from engine.policy import compute_logprobs
from forked import CONTEXT, within
from harness import checkpoint, files, run
from harness.files import checkpoint_folders
from helpers import records, same, until, weights, without

SMALL = [*helpers.SMALL, *(
    "--rollouts 4 --eval_every 2 --save_every 1 --schedule cosine --warmup 2").split()]


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A run that nothing interrupted, with all the state that a run can have."""
    out = tmp_path_factory.mktemp("resume") / "whole"
    flags = ["--model", base, *SMALL, "--loss", "fade", "--rollout_lag", "2", "--kl_coef", "0.01",
             "--entropy_coef", "0.01"]  # a gradient, whatever is sampled
    train.main([*flags, "--keep", "9", "--out", str(out)])
    return out, flags


def resume(out, *flags):
    """-> the run's folder"""
    train.main(["--out", str(out), "--resume", *flags])
    return out


def refused(capsys, out, *flags):
    return helpers.refused(capsys, train.main, "--out", out, "--resume", *flags)


def test_resumed_is_bit_for_bit_the_same(whole, tmp_path, capsys, monkeypatch):
    def log_(self, *given, log=run.Run.log):
        if sys.platform == "linux":  # a checkpoint that was removed would keep its place on disk
            assert "trainer.pt" not in pathlib.Path("/proc/self/maps").read_text()
        log(self, *given)
    monkeypatch.setattr(run.Run, "log", log_)
    out = without(whole[0], tmp_path / "run", 2, 3, 4)
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"rollout": 5, "rew')  # cut off while it was written
    resume(out)  # the run's own flags
    assert same(out, whole[0]) and "from rollout 1" in capsys.readouterr().out
    config, first = (json.loads((folder / "config.json").read_text()) for folder in (out, whole[0]))
    assert config["history"][:1] == first["history"] and len(config["history"]) == 2
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    # done already: nothing happens
    for flags in ("", "--force --loss grpo --lr 1", "--rollouts 3 --force"):
        resume(out, *flags.split())
        assert "all 4 rollouts are done; a larger --rollouts" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_shuffled_groups_resume_bit_for_bit(base, tmp_path, graded):
    """Also where rows, and whole steps, are without an advantage."""
    graded(groups=(0, 2))
    flags = ["--model", base, *SMALL, "--loss", "grpo", "--shuffle", "groups", "--keep", "9"]
    train.main([*flags, "--out", str(tmp_path / "whole")])
    out = without(tmp_path / "whole", tmp_path / "run", 3, 4)
    assert same(resume(out), tmp_path / "whole")
    steps = [step for record in records(out)[1:] for step in record["steps"]]
    assert len({step["optim/learnt_tokens"] for step in steps}) > 1
    train.main([*flags[:-4], "--keep", "9", "--out", str(tmp_path / "rows")])
    assert weights(tmp_path / "rows", 1) != weights(out, 1)  # completions, shuffled one by one


def test_a_lagging_policy_before_the_update_resumes_bit_for_bit(base, tmp_path):
    """Rollouts that wait in a checkpoint are scored again, and so is the gap to a teacher."""
    flags = ["--model", base, *SMALL, *(
        "--loss opd --old_logprobs proximal --rollout_lag 1 --lr 1e-3 --keep 9 --save_rollouts "
        f"--entropy_coef 1 --teacher {base}").split()]
    train.main([*flags, "--out", str(tmp_path / "whole")])
    out = without(tmp_path / "whole", tmp_path / "run", 3, 4)
    assert same(resume(out), tmp_path / "whole")
    kept = open_rollout(out / "rollouts" / "rollout_000004.pt")
    of_teacher, _ = compute_logprobs(kept.policy, kept.batch)  # the run began with it
    gap = (of_teacher - kept.batch.teacher_logprobs)[kept.batch.mask].abs()
    assert gap.max() < 1e-4 < (kept.batch.old_logprobs - kept.batch.sampler_logprobs).abs().max()
    # on the token page: an advantage for each token, and none of the completion's own
    own, of_tokens = walked(kept, "opd", kept.batch.mask, copy.deepcopy(kept.policy.state_dict()))
    teacher = (of_teacher - kept.batch.old_logprobs)[kept.batch.mask].numpy()
    assert of_tokens["advantage"][:, 0] == pytest.approx(teacher, abs=1e-4)
    assert {*own["advantages"]} == {0}
    assert kept.follow("grpo").batch.teacher_logprobs is None


def started(out, flags, lines):
    """-> train.py as a process, which has written so many records; what it says is beside out."""
    process = CONTEXT.Process(target=within, args=(
        ["train.py", *flags, "--out", str(out)], str(ROOT), str(out.parent), {}))
    process.start()
    log = out / "metrics.jsonl"
    until(lambda: not process.is_alive() or (
        log.exists() and log.read_text().count("\n") >= lines), 600)
    return process


def test_killed_at_random_moments(whole, tmp_path):
    """SIGKILL within each of three rollouts, --resume from the start. More: bench/kill.py"""
    out, rng, killed = tmp_path / "run", random.Random(7), 0
    for lines in (1, 2, 3):
        process = started(out, [*whole[1], "--resume"], lines)
        time.sleep(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        killed += process.exitcode == -signal.SIGKILL
    # as where it was killed while an old checkpoint was removed after the last one
    (out / "checkpoints/unfinished").mkdir(exist_ok=True, parents=True)
    train.main([*whole[1], "--out", str(out), "--resume"])
    assert killed and same(out, whole[0])
    assert "unfinished" not in {p.name for p in (out / "checkpoints").iterdir()}


def test_a_damaged_checkpoint_is_one_sentence(whole, tmp_path, capsys):
    """Its folder renamed, the run continues from the one before."""
    out = without(whole[0], tmp_path / "run", 4)
    damaged = out / "checkpoints" / "rollout_000003"
    (damaged / "trainer.pt").write_bytes((damaged / "trainer.pt").read_bytes()[:-100])
    with pytest.raises(train.RunFailed, match="rollout_000003/trainer.pt cannot be read"):
        resume(out)
    (damaged / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(SystemExit):
        resume(out)
    said = capsys.readouterr().err
    assert f"--resume: the newest checkpoint, {damaged}, cannot be loaded" in said
    damaged.rename(damaged.with_name("damaged"))
    resume(out)
    assert "from rollout 2" in capsys.readouterr().out and same(out, whole[0])


class Program:
    """Pickled, it runs a function of a stranger when it is read."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("change, said", [
    (lambda state: state.update(state=Program()), "more than tensors"),
    (lambda state: state["run"].update(rollout=-5), "it is of rollout -5"),
    *[(lambda state, name=name, owner=owner: state[owner].pop(name), name) for owner, name in (
        ("run", "rollout"), ("trainer", "optimizer"), ("trainer", "optimizer_steps"),
        ("run", "pending"))],
    (lambda state: state["run"]["flags"].clear(), "loss"),
    (lambda state: state["trainer"]["optimizer"].clear(), "optim state_dict is empty")])
def test_a_checkpoint_with_other_content_is_one_sentence(whole, tmp_path, change, said,
                                                         monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = without(whole[0], tmp_path / "run", 4)
    path = out / "checkpoints/rollout_000003/trainer.pt"
    state = torch.load(path)
    change(state)
    torch.save(state, path)
    with pytest.raises(train.RunFailed, match=f"trainer.pt cannot be read .*{said}.*renamed"):
        resume(out)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("line", [b'{"\xff": 1}\n', b"[" * 100_000 + b"\n"], ids=["bytes", "deep"])
def test_a_damaged_log_is_one_sentence(whole, tmp_path, line, capsys):
    out = without(whole[0], tmp_path / "run", 3, 4)
    log = (out / "metrics.jsonl").read_bytes()
    (out / "metrics.jsonl").write_bytes(log.replace(b"{", line + b"{", 1))
    assert "a file of the run is damaged" in helpers.refused(capsys, analyse, "table", out)
    with pytest.raises(train.RunFailed, match="metrics.jsonl is damaged .*--resume continues"):
        resume(out)
    (out / "metrics.jsonl").write_bytes(log)
    assert same(resume(out), whole[0])


@pytest.mark.draws
@pytest.mark.parametrize("name", ["config.json", "curves.png"])
def test_a_file_that_cannot_be_written_is_one_sentence_and_nothing_is_lost(
        whole, tmp_path, name, monkeypatch, capsys):
    """As on a full disk: here a folder is in the place of the file that is written aside."""
    out = without(whole[0], tmp_path / "run", 4)
    before = (out / name).read_bytes()
    (out / f".{name}").mkdir()
    monkeypatch.setattr(sys, "argv", ["train.py", "--out", str(out), "--resume"])
    said = helpers.refused(capsys, lambda _: runpy.run_path(
        str(ROOT / "train.py"), run_name="__main__"), code=1)
    assert said.startswith("train.py: ") and str(out / name) in said
    assert (out / name).read_bytes() == before
    (out / f".{name}").rmdir()
    assert same(resume(out), whole[0])


def test_without_any_good_checkpoint_the_run_starts_again_where_it_is(whole, tmp_path, monkeypatch):
    """With its flags, here in the default folder of another method."""
    monkeypatch.chdir(tmp_path)
    out = without(whole[0], tmp_path / "runs" / "grpo-16-0", 1, 2, 3, 4)
    with open(out / "metrics.jsonl", "a") as file:
        file.write("garbage\n")
    train.main(["--resume"])
    assert same(out, whole[0]) and [path.name for path in out.parent.iterdir()] == [out.name]
    assert "garbage" in (out / "metrics.jsonl.old").read_text()  # nothing is thrown away


def test_other_flags_are_listed_and_those_of_the_method_refused(whole, tmp_path, capsys):
    out = without(whole[0], tmp_path / "run", 4)
    for flags, named in (
            ("--lr 1e-3", "--lr was 0.0001 and is now 0.001"), ("--loss grpo", "--loss was fade"),
            ("--delta_min 0.5", "--delta_min was 0.3 and is now 0.5"), ("--seed 3", "--seed"),
            ("--rollouts 9", "--rollouts"), ("--temperature 0.5", "--temperature")):
        said = refused(capsys, out, *flags.split())
        assert named in said and "--force" in said
    resume(out, "--keep", "5", "--save_every", "3")
    assert "resuming, but --keep was 9 and is now 5" in capsys.readouterr().out
    assert same(out, whole[0])
    out = without(whole[0], tmp_path / "other", 4)
    resume(out, *"--lr 1e-3 --loss grpo --temperature 0.8 --schedule constant --force".split())
    assert "--lr was" in capsys.readouterr().out and weights(out) != weights(whole[0])
    last = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])  # as forced
    assert last["optim/lr"] == pytest.approx(1e-3) and last["sampler/logp_absdiff_max"] < 1e-4
    assert "adv/fade_alpha" not in last
    forced = train.parse_args([*"--resume --force --loss dapo --out".split(), str(whole[0])])[1]
    assert forced.flags["eps_high"] == 0.28  # the other row's, and not what fade had
    for fixed in ("--lora_rank 2", f"--model {out}/checkpoints/rollout_000003"):
        assert "train another" in refused(capsys, out, "--force", *fixed.split())
    resume(without(whole[0], tmp_path / "padded", 4), "--no-share_prompts")
    said = capsys.readouterr().out
    assert "--share_prompts was True and is now False" in said and "tokens, padded" in said


@pytest.mark.parametrize("name, content", [
    *(("config.json", text) for text in (
        b"", b"[]", b"[" * 100_000, b'{"flags": {}, "checksums": {}}', b'{"flags": {}}',
        b'{"flags": {"lr": null, "schedule": "cosin"}}', b'{"flags": {"group_size": "x"}}', None)),
    *(("rewards.py", text) for text in (b"def f(", b"\xff", None))], ids=lambda x: str(x)[:40])
def test_a_file_that_cannot_be_read_is_refused(whole, tmp_path, name, content, capsys):
    out = without(whole[0], tmp_path / "run", 4)
    (out / name).unlink() if content is None else (out / name).write_bytes(content)
    assert "cannot be read" in refused(capsys, out) and records(out) == records(whole[0])


def test_a_folder_of_another_process_and_a_pipe_in_place_of_a_file_are_refused(
        whole, tmp_path, capsys):
    out = without(whole[0], tmp_path / "run", 4)
    holder = os.open(out, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    assert "another train.py is at work" in refused(capsys, out)
    os.close(holder)
    assert records(out) == records(whole[0])
    # reading a pipe would wait forever
    (out / "config.json").unlink()
    os.mkfifo(out / "config.json")
    assert "cannot be read (it is no file)" in refused(capsys, out)
    os.mkfifo(tmp_path / "config.json")
    assert "it has no config.json" in helpers.refused(capsys, train.main, "--model", tmp_path)


def test_saved_flags_that_nothing_takes_are_a_sentence_and_strangers_set_no_flags_of_the_command(
        whole, tmp_path, capsys):
    out = without(whole[0], tmp_path / "run")
    config = json.loads((out / "config.json").read_text())

    def save(**flags):
        changed = dict(config, flags={**config["flags"], **flags})
        (out / "config.json").write_text(json.dumps(changed))
    for name, value in (("loss", "gone"), ("objective", "gone"), ("seed", [1]), ("dtype", "float8"),
                        ("mask_truncated", "yes"), ("eps_low", "small")):
        save(**{name: value})
        assert name in refused(capsys, out)
    save(allow_unsafe_code=True, force=True, out="elsewhere")
    args, _ = train.parse_args(["--resume", "--out", str(out)])
    assert (args.allow_unsafe_code, args.force, args.out) == (False, False, str(out))


@pytest.mark.parametrize("finished, name, old, new, said", [
    (False, "losses.py", "advantages / delta", "advantages",
     "losses.py changed in weigh_failures: "),
    (True, "rewards.py", "def arithmetic", "def before", "rewards.py changed in arithmetic: "),
    (True, "config.json", r'"weights of --model": \d+', '"weights of --model": 1',
     "the weights of --model changed: "),
    (False, "config.json", r'"problems": \d+', '"problems": 1', "the problems changed: "),
], ids=["row", "verifier", "weights", "problems"])
def test_other_code_is_named_and_needs_force(whole, tmp_path, finished, name, old, new, said,
                                             capsys):
    out = without(whole[0], tmp_path / "run", *[4] * (not finished))
    text, count = re.subn(old, new, (out / name).read_text())
    (out / name).write_text(text)
    assert count == 1 and said in refused(capsys, out) and records(out) == records(whole[0])
    resume(out, "--force")
    told = capsys.readouterr().out
    assert f"resuming, but {said[:-2]}" in told and ("rollouts are done" in told) == finished
    assert same(out, whole[0])
    if not finished:  # the folder has the code that continued it
        assert (out / "losses.py").read_text() == (ROOT / "losses.py").read_text()
        history = json.loads((out / "config.json").read_text())["history"]
        assert [entry["after"] for entry in history] == [0, 3]  # of each command, with its commit
        resume(out)


def test_a_signal_saves_and_stops(whole, tmp_path):
    """SIGINT, from a terminal; SIGTERM, as schedulers send it, is below."""
    out = tmp_path / "run"
    process = started(out, [*whole[1], "--save_every", "0"], 2)  # handlers come after the first
    os.kill(process.pid, signal.SIGINT)
    process.join(600)
    said = (tmp_path / "stdout").read_text() + (tmp_path / "stderr").read_text()
    assert process.exitcode == 130
    assert "--resume continues" in said and "Traceback" not in said
    assert len(list((out / "checkpoints").iterdir())) == 1
    assert same(resume(out), whole[0])


@pytest.fixture
def tmpfs(tmp_path):
    """tmpfs(options) -> a folder mounted so."""
    made = []

    def mount(options):
        folder = tmp_path / f"tmpfs{len(made)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("mounting is not allowed here")
        made.append(folder)
        return folder

    yield mount
    for folder in made:
        subprocess.run(["umount", "-l", folder])


def test_a_full_disk_is_one_sentence_and_the_last_checkpoint_stays(whole, base, tmpfs, capsys):
    folder = tmpfs("size=24m")  # a checkpoint has 11 MB
    out = folder / "run"
    with pytest.raises(train.RunFailed, match="cannot be written.*--resume continues"):
        train.main([*whole[1], "--keep", "9", "--out", str(out)])
    assert checkpoint_folders(out)[-1].name == "rollout_000002"
    assert not (out / "checkpoints" / "unfinished").exists()
    subprocess.run(["mount", "-o", "remount,size=200m", folder], check=True)
    assert same(resume(out), whole[0])
    with pytest.raises(train.RunFailed, match="cannot be written.*--resume continues"):
        train.main(["--model", base, *SMALL, "--save_every", "0", "--rollouts", "40",
                    "--eval_every", "0", "--out", str(tmpfs("size=96k") / "run")])
    assert "cannot be written" in helpers.refused(
        capsys, train.main, "--model", base, *SMALL, "--out", tmpfs("size=1m,ro") / "run")


@pytest.mark.parametrize("owner, name, nth, last", [
    (run, "seed_of", 3, 3), (checkpoint, "save", 1, 4)])
def test_a_signal_between_rollouts_waits_and_in_the_last_checkpoint_changes_nothing(
        owner, name, nth, last, base, tmp_path, monkeypatch):
    original, calls, out = getattr(owner, name), [], tmp_path / "run"

    def called(*args, **kwargs):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)
    monkeypatch.setattr(owner, name, called)
    with pytest.raises(SystemExit, match="143") if last < 4 else nullcontext():
        train.main(["--model", base, *SMALL, "--save_every", "0", "--out", str(out)])
    assert [path.name for path in checkpoint_folders(out)] == [f"rollout_{last:06d}"]
    assert len(records(out)) == last + 1 and (out / "curves.png").exists() == (last == 4)


OWN = '''
STEP = 1
ENDS = 1, (2, 3)
STEPS = {helper, *MORE}

def helper(x):
    known = ENDS, STEPS
    return x + STEP

def other(x):  # calls a helper
    return helper(x)

@marked
def row(x):
    return [helper(y) for y in x] + [0]

class Kind:
    number = 2

ROWS = {"a": Kind(row, lambda x: 1), "b": Kind(other), **MORE}
ROWS["mine"] = Kind(other)
'''


@pytest.mark.quick
@pytest.mark.parametrize("old, new, changed", [
    ("x + STEP", "x + 2 * STEP", {"helper"}), ("STEP = 1", "STEP = 2", {"STEP"}),
    ("(2, 3)", "(2, 4)", {"ENDS"}), ("{helper, *MORE}", "{helper, other, *MORE}", set()),
    ("[0]", "[3]", {"row"}), ("x: 1", "x: 3", {"ROWS['a']"}),
    ("@marked\n", "", {"row"}), ("number = 2", "number = 3", {"Kind"}),
    ("return helper(x)\n", "return 2 * helper(x)\n", set()), ("Kind(other)}", "0}", set()),
    ("calls a", "calls no", set()), ("x + STEP", "(x\n            + STEP)  # more", set())])
def test_an_edit_counts_where_it_is_reached(old, new, changed):
    before, after, beside = (  # the last has a function of a local variable's name
        files.reached(ast.parse(text), ["ROWS['a']", "gone", None])
        for text in (OWN, OWN.replace(old, new, 1), f"{OWN}\ndef x():\n    pass\n"))
    assert before == beside
    assert before.keys() == after.keys() == {
        "ROWS['a']", "row", "helper", "STEP", "ENDS", "Kind"}
    assert set(checkpoint.differing(before, after)) == changed
    assert {"ROWS['mine']", "other"} < {*files.reached(ast.parse(OWN), ["ROWS['mine']"])}


@pytest.mark.quick
def test_what_rows_corrections_and_verifiers_reach():
    def of(name, roots):
        return {*files.reached(ast.parse(files.CODE[name]), roots)}

    def of_flags(*argv):
        return of("losses.py", train.parse_args(argv)[0].roots)
    grpo, helpers = of_flags(), {"token_mask", "sampler_log_ratio", "within"}
    assert {"METHODS['grpo']", "zscore", "ppo_clip", "seq_mean", "Tokens", "loss_terms",
            "group_advantages"} < grpo
    assert not grpo & {"METHODS['dapo']", "fade", "gspo", "card"}
    assert of_flags("--select", "own,token_mask") - grpo == helpers
    assert of_flags("--aggregate", "constant") - grpo == {"constant"}
    assert "arithmetic" in of("rewards.py", ["REWARDS['countdown']"])


def other_weights(folder):
    weights = {name: weight if "embed" in name else 2 * weight  # as adapters leave it
               for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))


def test_other_weights_are_seen_in_each_kind_of_file_and_their_evaluation_is_not_continued(
        base, tmp_path, capsys):
    folder = shutil.copytree(base, tmp_path / "model")
    argv = (f"--model {folder} --out {tmp_path}/out --sampler transformers --limit 2 --samples 2 "
            "--max_tokens 4 --max_prompt_tokens 32").split()
    evaluation.main(argv)
    evaluation.main(argv)
    other_weights(folder)
    assert "was begun with weights of --model" in helpers.refused(capsys, evaluation.main, *argv)
    settings = tmp_path / "out" / "settings.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({**known, "weights of --model": None}))
    evaluation.main(argv)  # they could not be read
    first = files.checksum_of_weights(folder)
    other_weights(folder)
    assert first != files.checksum_of_weights(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert files.checksum_of_weights(folder) not in (first, None)
    assert files.checksum_of_weights("no/such") is None
