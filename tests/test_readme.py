"""The pages: their commands, links and examples work, their tables are those of the code."""

import importlib
import json
import re
import shlex
import shutil

import pytest

import analysis.__main__
import anatomy.__main__
import data
import eval
import losses
import train
from bench import fit
from conftest import ROOT
from harness import log
from helpers import CORE, needs_venv, paste, python, read_rows, run_all
from losses import METHODS, every_token

README = (ROOT / "README.md").read_text()
PATHS = [*(ROOT / name for name in ("README.md", "RESULTS.md", "data/README.md",
                                    "study/results/tables.md", "bench/measured.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {path: path.read_text() for path in PATHS}
# of this project's pages, tables and code included; what is generated or a record is not counted
WORDS = {"README.md": 1300, "RESULTS.md": 1350, "data/README.md": 1000, **{
    f"docs/{name}.md": words for name, words in dict(
        running=1800, scaling=1500, real_model=1000, lessons=2700, lectures=800, theory=1300,
        evaluation=1450, checked=800, security=800, own_task=800, methods=900, analysis=650,
        changes=160).items()}}
LESSONS, THEORY = (PAGES[ROOT / "docs" / f"{name}.md"] for name in ("lessons", "theory"))
SHORT, = re.findall(r'^SHORT="(.*)"$', LESSONS, re.M)


# in blocks of sh, without those with other variables than the lessons'; a loop's first turn
COMMANDS = set()
for line in "".join(re.findall(r"```sh\n(.*?)```", "\n".join(PAGES.values()), re.S)).splitlines():
    if loop := re.match(r"for (\w+) in (\S+) .*?; do (.*); done$", line):
        line = loop[3].replace(f"${loop[1]}", loop[2])
    line = line.split("  #")[0].strip().replace("$SHORT", SHORT)
    if "$" not in line:
        COMMANDS.add(line)
assert {"./run_all.sh", "./run_all.sh test",
        "python train.py --loss fade --steps_per_rollout 16"} <= COMMANDS  # promised
SKETCHES = re.findall(r"```python\n(.*?)```", README, re.S)
OWN_MEAN = """
def own_mean(loss, mask, size):
    return (loss * mask).sum() / size.completions

METHODS["own_mean"] = Method(zscore, ppo_clip, own_mean, source="my idea")"""
OWN_VERIFIER = re.search(r"```python\n(from examples.own_task .*?)```",
                         (ROOT / "docs" / "own_task.md").read_text(), re.S)[1]
NOTES = json.loads((ROOT / "docs" / "methods.json").read_text())


def test_the_table_of_methods_and_the_reading_list_are_those_of_the_code():
    """Each line is a row of METHODS; a fork's method need not have a line."""
    listed = [line for line in PAGES[ROOT / "docs" / "methods.md"].splitlines()
              if line.startswith("| `") and line.split("`")[1] in METHODS]
    table = []
    for name, method in METHODS.items():
        source = NOTES.get(name, {}).get("source", method.source)
        source = (re.match(r".*?arXiv [\d.]+\d", source) or re.match(".*", source))[0]
        source = re.sub(r"arXiv ([\d.]+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
        select = [f.__name__ for f in (method.select, *method.passes) if f is not every_token]
        cells = [f"`{name}`", method.advantage.__name__, ", ".join(select),
                 method.objective.__name__, method.aggregate.__name__, source]
        table.append(f"| {' | '.join(cells)} |")
    assert len(listed) >= 20 and set(listed) <= set(table), "\n".join(table)
    # the long form of a source has the row's in it
    assert all(METHODS[name].source in note["source"] for name, note in NOTES.items())
    # to a tenth, so that a fork's changes pass
    listed = re.findall(r"^\| `([\w./]+)` \| (\d+) \|", README, re.M)
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name in CORE}
    assert {name for name, _ in listed} == set(CORE) and len(README.splitlines()) <= 150
    wrong = {name: lengths[name] for name, lines in listed
             if abs(lengths[name] - int(lines)) > max(10, lengths[name] // 10)}
    assert not wrong, f"README.md has other numbers of lines than {wrong}"


@pytest.mark.slow  # a fork's pages may be longer
def test_pages_keep_to_their_words():
    words = {name: len((ROOT / name).read_text().split()) for name in WORDS}
    assert {name: n for name, n in words.items() if n > WORDS[name]} == {}
    assert {*WORDS} == {str(path.relative_to(ROOT)) for path in PATHS} - {
        "study/results/tables.md", "bench/measured.md"} and sum(words.values()) <= 18_150


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_links_and_names_is_there(path):
    text = PAGES[path]
    for link, anchor in re.findall(r"\]\(([^)#:]*)#?([^):]*)\)", text):
        target = path.parent / link if link else path
        assert target.exists(), f"{path.name}: {link}"
        assert target.suffix != ".png" or target.stat().st_size > 5_000
        if anchor:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            anchors = {re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles}
            assert anchor in anchors, f"{path.name}: {link}#{anchor}"
    folders = "analysis|anatomy|bench|data|docs|engine|examples|harness|graders|study|tests"
    files = re.findall(rf"python ([\w/]+\.py)|`((?:{folders})/[\w/]+\.\w+)`", text)
    missing = {name for name in map("".join, files) if not (ROOT / name).exists()}
    for name in re.findall(rf"python -m ((?:{folders})(?:\.\w+)*)", text):
        place = ROOT / name.replace(".", "/")
        if not (place.with_suffix(".py").exists() or (place / "__main__.py").exists()):
            missing.add(name)
    assert not missing


@pytest.fixture
def new_methods(monkeypatch):
    names = dict(vars(losses), METHODS=dict(METHODS))
    for code, name in zip(SKETCHES, ("smooth", "unlikely"), strict=True):
        exec(code, names)
        monkeypatch.setitem(METHODS, name, names["METHODS"][name])


@pytest.mark.parametrize("command", sorted(
    c for c in COMMANDS if re.search(
        r" train\.py|^python (bench/fit\.py|eval\.py|-m analysis|-m anatomy) ", c)))
def test_commands_have_flags_that_exist(command, new_methods, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where there are no runs yet
    for flag in re.findall(r"--(?:data|completions) (runs/\S+|evals/\S+)", command):
        file = tmp_path / flag
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(dict(prompt="1", answer=dict(nums=[1], target=1),
                                        verifier="countdown")) + "\n")
    for model in re.findall(r"--(?:model|teacher) (runs/\S+)", command):
        (tmp_path / model).mkdir(parents=True, exist_ok=True)
        (tmp_path / model / "config.json").touch()
    _, program, argv = re.split(r" (train\.py|bench/fit\.py|eval\.py|-m analysis|-m anatomy) ",
                                command)
    argv = [flag for flag in shlex.split(argv) if flag != "--resume"]
    if program == "bench/fit.py":
        assert fit.size_of(argv.pop(0))
    if program in ("train.py", "bench/fit.py"):
        args, method = train.parse_args(argv)
        assert args.loss in METHODS and method.flags is not None
    elif program == "eval.py":
        names = eval.parse_args(argv).benchmarks.split(",")
        assert all(name in data.NAMES or name.endswith(".jsonl") for name in names)
    else:
        room = analysis.__main__ if program == "-m analysis" else anatomy.__main__
        analysis.__main__.read_command(room.make_parser(), room.COMMANDS, argv)


def test_the_examples_of_new_methods(new_methods, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    smooth, unlikely = (train.parse_args(["--loss", name])[1].flags
                        for name in ("smooth", "unlikely"))
    assert smooth == dict(tau=2.0) and SKETCHES[0] in LESSONS
    assert dict(memory=0.9, unlikely_share=0.5).items() <= unlikely.items()


@pytest.mark.slow
def test_the_examples_pass_what_is_tested_of_every_method(copy):
    """Pasted where README and own_task.md say, with an aggregate of one's own: the methods are
    among the cases of the tests that go through METHODS, and no quick test of a table fails."""
    shutil.copytree(ROOT / "tests", copy / "tests")
    paste(copy / "losses.py", "\n".join([*SKETCHES, OWN_MEAN]), "METHODS")
    paste(copy / "rewards.py", OWN_VERIFIER, "REWARDS")
    others = " or ".join([*(f"[{name}" for name in METHODS), "linear", "worker", "hang",
                        "file_is_graded"])  # of what no table changes
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", "--quick", "tests/test_losses.py",
                  "tests/test_policy.py", "tests/test_style.py", "tests/test_rewards.py",
                  "-k", f"not ({others})", cwd=copy)
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 100


def test_the_task_of_lm_eval_has_problems_and_rewards():
    task = importlib.import_module("examples.lm_eval.task")
    held_out = task.problems()["test"]
    assert len(held_out) == 256 and held_out[0]["prompt"]
    assert task.reward(held_out[0], ["<answer>-1</answer>"]) == {"reward": 0.0}


def test_the_code_of_the_theory_runs_can_fail_and_has_every_number_above_it():
    blocks = re.findall(r"```python\n(.*?)```", THEORY, re.DOTALL)
    names = {}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 11 and all("assert" in block for block in blocks[1:])
    assert len(THEORY.splitlines()) <= 150
    for section in THEORY.split("\n## ")[1:]:
        *parts, end = re.split(r"```python\n(.*?)```", section, flags=re.DOTALL)
        code = " ".join(parts[1::2])
        text = " ".join([*parts[::2], end])
        for number in re.findall(r"(?<![\w.])-?\d+\.\d+", text):
            assert number.rstrip("0").rstrip(".") in code, number


SMALL = ("--sampler transformers --problems_per_rollout 4 --group_size 4 --eval_problems 4 "
         "--eval_samples 2 --max_tokens 16 --max_prompt_tokens 32")


@pytest.mark.parametrize("flags", [
    "--loss fade --kl_coef 0.1 --entropy_coef 0.1 --old_logprobs proximal --rollout_lag 1 "
    "--select token_truncate,geometric_mask", "--loss acpo", "--loss p3o"])
def test_every_number_of_the_log_is_on_a_page(flags, tmp_path):
    text = PAGES[ROOT / "README.md"] + PAGES[ROOT / "docs/running.md"]
    told = {*re.findall("`([^`\n]+)`", text)}
    patterns = [re.escape(x).replace("NAME", r"\w+").replace("KIND", r"\w+")
                .replace(r"bin0\.\.4", r"bin\d").replace(r"\.\.\.", ".*") for x in told if "/" in x]
    train.main([*SMALL.split(), *flags.split(), "--rollouts", "2", "--eval_every", "0",
                "--steps_per_rollout", "2", "--out", str(tmp_path / "run")])
    record = read_rows(tmp_path / "run")[-1]
    logged = {*record, *record["steps"][0]} - {"rollout", "steps"} - told - log.SHOWN.keys()
    assert not [name for name in logged if not any(re.fullmatch(x, name) for x in patterns)]


@pytest.mark.parametrize("words, says", [
    ("nothing", "there is no command nothing"), ("results all", "no more words, as all"),
    ("full --rollouts 2", "no more words, as --rollouts")])
def test_run_all_refuses_words_that_it_would_ignore(words, says):
    done = run_all(*words.split())
    assert done.returncode == 2 and says in done.stderr


@pytest.mark.slow
@needs_venv
def test_run_all_full(base, tmp_path):
    """A file of runs: their time is estimated first, and a failure is named. Of several runs, and
    what is refused: test_portable.py"""
    grid, out = tmp_path / "grid.txt", tmp_path / "runs"
    grid.write_text("# a comment\na  4  --loss grpo --eps_high 0.3\n")
    env = dict(GRID=str(grid), RUNS=str(out), MODEL=base, DATA="countdown", SEEDS="0", JOBS="2",
               ROLLOUTS="1", EXTRA=SMALL + " --eval_every 1")
    done = run_all("full", **env)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "1 runs of 1 rollouts, 2 at a time: about 0." in done.stdout
    assert done.stdout.count(" is done") == 1
    assert "| grpo | 4 | 1 |" in (out / "table.md").read_text()
    assert all((out / name).stat().st_size > 5_000 for name in ("curves.png", "passk.png"))
    flags = json.loads((out / "a-4-0" / "config.json").read_text())["flags"]
    assert (flags["eps_high"], flags["lr"], flags["model"]) == (0.3, 1e-6, base)
    done = run_all("full", **{**env, "EXTRA": SMALL + " --lr 1"})
    assert done.returncode and "continues" in done.stderr
    assert done.stdout.count("failed") == 1 and "--lr was" in done.stdout  # others than the runs'
