import fcntl
import functools
import gc
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# BENCHMARKS=folder, no part of the project: files with rows of the sets of data/sets.py, and
# ../graders/pairs.jsonl with labelled pairs of answers
BENCHMARKS = os.environ.get("BENCHMARKS") and Path(os.environ["BENCHMARKS"]).resolve()
needs_benchmarks = pytest.mark.skipif(not BENCHMARKS, reason="no BENCHMARKS=folder is given")
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# one thread, before torch is imported: threads that fight for cores are several times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a shell's background job ignores Ctrl-C, and would hand that on to the processes of tests
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402

from data import BASE, countdown  # noqa: E402

# a second of each run
countdown.held_out = functools.cache(countdown.held_out)

# --quick: these files but for their tests marked slow, and tests of others that are marked quick.
# None needs vLLM or the network, or takes more than a few seconds
QUICK = {"test_exercises.py", "test_losses.py", "test_answers.py", "test_policy.py",
         "test_readme.py", "test_rewards.py", "test_sets.py", "test_style.py", "test_worked.py"}
# files of minutes, the longest first: so they begin where several processes run the tests
SLOW = [f"test_{name}.py" for name in (
    "real_model parallel gpu_bench copies readme sandbox train fit resume check sampler lora base "
    "portable answers").split()]
PROGRAMS = {"test_sandbox.py", "test_rewards.py"}  # these run programs in the sandbox


def between(values):
    """A threshold off all values: the middle of the widest gap among the eight around the median"""
    middle = values.sort().values[len(values) // 2 - 4:][:8]
    i = middle.diff().argmax()
    return middle[i:i + 2].mean().item()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the tests of every minute")


def pytest_configure(config):
    for marker in ("quick: a test of --quick in a file that is none",
                   "slow: no test of --quick in a file that is one",
                   "draws: its runs draw their curves",
                   "benchmarks: it can use the files of BENCHMARKS"):
        config.addinivalue_line("markers", marker)
    if config.getoption("--quick"):
        os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when it is imported


def is_quick(item):
    return item.get_closest_marker("quick") or (
        item.path.name in QUICK and not item.get_closest_marker("slow"))


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = filter(is_quick, items)
    place = {name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: place.get(item.path.name, len(SLOW)))


def pytest_collection_finish():
    gc.freeze()  # a collection, of which some tests take many, does not go through the packages


@pytest.fixture(scope="module", autouse=True)
def in_turns(request, tmp_path_factory):
    """Files of PROGRAMS wait for each other: the sandbox has one limit on processes for all."""
    with open(tmp_path_factory.getbasetemp().parent / "programs", "w") as file:
        if request.path.name in PROGRAMS:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """A run in this process draws no curves, which take long, unless its test is marked `draws`."""
    if "train" in sys.modules and not request.node.get_closest_marker("draws"):
        monkeypatch.setattr("harness.run.Run.draw", lambda run: (run.out / "curves.png").touch())


@pytest.fixture(scope="session")
def base():
    return BASE


@pytest.fixture(scope="session")
def tokenizer():
    from study import tiny  # not above: it imports huggingface_hub
    return tiny.tokenizer()


@pytest.fixture(scope="session")
def small(tmp_path_factory, tokenizer):
    """small(tied) -> the folder of an untrained model, smaller than the base."""
    from study import tiny

    def make(tied=False):
        folder = tmp_path_factory.mktemp(f"small-{tied}")
        recipe = dict(tiny.RECIPE, hidden=64, mlp=96, layers=2, heads=2, tied=tied, seed=5)
        model = tiny.empty_model(recipe, len(tokenizer))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)  # an untrained model is all but uniform; this one has opinions
        for part in (model, tokenizer):
            part.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def model(small):
    return small()


@pytest.fixture(scope="session")
def kept_run(base, tmp_path_factory):
    """A run of one rollout of fade in 4 steps, which it keeps, with the checkpoint after it."""
    import train

    out = tmp_path_factory.mktemp("kept") / "run"
    train.main(["--model", base, "--out", str(out), *(
        "--loss fade --save_rollouts --steps_per_rollout 4 --warmup 2 --schedule cosine "
        "--entropy_coef 0.01 --sampler transformers --rollouts 1 --problems_per_rollout 8 "
        "--group_size 8 --max_tokens 16 --max_prompt_tokens 16 --lr 1e-3 --eval_every 0 "
        "--tokens_per_micro_batch 4096").split()])
    return out


@pytest.fixture
def kept(kept_run):
    from anatomy import rollout

    return rollout.open_rollout(kept_run / "rollouts" / "rollout_000001.pt")


@pytest.fixture
def graded(monkeypatch):
    """Rewards go by a completion's place: a third of each group are right. graded(groups) does so
    in these groups, and makes the others all wrong."""
    import rollout

    own = rollout.grade

    def mixed(groups=None):
        def grade(problems, texts, **options):
            return [[x._replace(reward=float((i + j) % 3 == 0 and (groups is None or i in groups)))
                     for j, x in enumerate(group)]
                    for i, group in enumerate(own(problems, texts, **options))]
        monkeypatch.setattr(rollout, "grade", grade)
    mixed()
    return mixed


@pytest.fixture
def copy(tmp_path):
    for path in [*ROOT.glob("*.py"), ROOT / "requirements.txt"]:
        shutil.copy(path, tmp_path)
    for name in ("analysis", "anatomy", "data", "docs", "engine", "examples", "harness", "graders",
                 "study"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path
