import fcntl
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# one thread, before torch is imported: threads that fight for cores are several times slower
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what torch.compile keeps is another program with other instructions, and one does not look
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir(), "-".join(
    ["inductor", str(os.getuid()), os.environ.get("ATEN_CPU_CAPABILITY", "all")]))))
# a shell's background job ignores Ctrl-C, and would hand that on to the processes of tests
signal.signal(signal.SIGINT, signal.default_int_handler)

import torch  # noqa: E402

from data.recipe import BASE  # noqa: E402

# The tests of --quick, for the work of every minute: none needs vLLM or the network, or takes more
# than a few seconds. Whole files but for TOO_SLOW, or the tests that are
# named: with all their cases, or with the one in brackets
ALL = ("",)
TOO_SLOW = {
    "test_memory_of_the_log_probabilities_is_a_chunks",
    "test_labelled_pairs",
    "test_a_power_tower_ends",
    "test_real_rows",
    "test_the_quick_tests_are_there",
}
QUICK = {
    "test_losses.py": ALL,
    "test_policy.py": ALL,
    "test_math_equal.py": ALL,
    "test_rewards.py": ALL,
    "test_sets.py": ALL,
    "test_style.py": ALL,
    "test_data.py": (
        "test_puzzles[countdown]",
        "test_batches_are_functions_of_seed_and_rollout",
    ),
    "test_worked.py": (
        "test_puzzles_are_functions_of_seed_index_and_split",
        "test_an_expression_has_the_value_of_its_chain",
        "test_inverse_undoes_each_operator",
        "test_demonstrations_are_right_and_then_wrong_in_part",
        "test_the_verifier_is_not_fooled",
        "test_an_answer_is_given_once_and_closed",
    ),
    "test_eval.py": (
        "test_pass_at_k_is_the_share_of_choices_with_a_correct_one",
        "test_majority",
        "test_interval",
        "test_bad_input_is_one_sentence_and_exit_code_2",
        "test_another_value_of_any_flag_does_not_continue_a_folder",
        "test_damaged_completions_are_one_sentence",
    ),
    "test_tokens.py": (
        "test_codes_keep_what_they_promise",
        "test_packed_arrays_come_back",
        "test_numbers_are_those_of_the_analysis",
        "test_texts_of_tokens_are_the_text",
        "test_bytes_that_are_no_text",
        "test_words_that_begin_with_a_space",
        "test_no_text_is_markup",
        "test_what_is_wrong_is_said",
    ),
    "test_train.py": (
        "test_bad_flags_are_one_sentence_and_exit_code_2",
        "test_help_lists_the_flags_of_the_method_chosen",
        "test_flags_reach_the_method",
        "test_no_two_functions_of_an_axis_pair_share_a_flag_and_none_is_a_common_one",
        "test_mistakes_in_a_row_of_ones_own_are_a_sentence",
        "test_a_cell_exists_once_a_row_uses_it",
        "test_every_method_runs[fade]",
    ),
    "test_gym.py": (
        "test_the_last_answer_after_thinking_is_graded",
        "test_without_an_answer_nothing_is_graded",
        "test_an_answer_that_is_evaluated_calls_nothing",
    ),
    "test_readme.py": (
        "test_the_table_of_methods_is_that_of_the_code",
        "test_every_source_of_a_row_is_in_its_long_form",
        "test_the_reading_list_is_the_core_with_its_lengths",
        "test_pages_link_to_what_is_there",
        "test_commands_have_flags_that_exist",
        "test_the_examples_of_new_methods",
    ),
    "test_portable.py": (
        "test_the_lock_meets_each_requirement",
        "test_the_lock_is_installed_where_it_fits",
        "test_elsewhere_the_bounds_are_installed",
        "test_commands_of_run_all_without_linux_tools",
        "test_a_verifier_that_hangs_is_killed",
    ),
}


# files of minutes, which begin first where several processes run the tests
SLOW = {"test_notebook.py", "test_resume.py", "test_parallel.py", "test_gpu_bench.py",
        "test_train.py", "test_readme.py"}
# these run programs in the sandbox, whose limit on processes is one for all: a fork bomb of one
# would fail programs of the other
PROGRAMS = {"test_sandbox.py", "test_rewards.py"}


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="only the tests of every minute")


def pytest_configure(config):
    if config.getoption("--quick"):
        os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it once, when it is imported


def is_quick(item):
    names = QUICK.get(item.path.name, ())
    function = item.name.partition("[")[0]
    if names == ALL:
        return function not in TOO_SLOW
    return item.name in names or function in names


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not is_quick(item)])
        items[:] = [item for item in items if is_quick(item)]
    items.sort(key=lambda item: item.path.name not in SLOW)


@pytest.fixture(scope="module", autouse=True)
def in_turns(request, tmp_path_factory):
    """Files of PROGRAMS wait for each other, where several processes run the tests."""
    if request.path.name not in PROGRAMS:
        yield
        return
    with open(tmp_path_factory.getbasetemp().parent / "programs", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def base():
    """The folder of the embedded base."""
    return BASE


@pytest.fixture(scope="session")
def tokenizer():
    from study import tiny

    return tiny.tokenizer()


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """small(tied) -> the folder of an untrained model, smaller than the base."""
    from study import tiny

    def make(tied=False):
        folder = tmp_path_factory.mktemp(f"small-{tied}")
        tok = tiny.tokenizer()
        recipe = dict(tiny.RECIPE, hidden=64, mlp=96, layers=2, heads=2, tied=tied, seed=5)
        model = tiny.empty_model(recipe, len(tok))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)  # an untrained model is all but uniform; this one has opinions
        for part in (model, tok):
            part.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture
def graded(monkeypatch):
    """Rewards go by a completion's place, whatever the model samples: in each group a third of them
    are right. graded(groups) leaves these numbers of groups alone so, and makes the others all
    wrong."""
    import data

    def mixed(groups=None):
        def grade(problems, texts, **options):
            rewards, counts = rewards_grade(problems, texts, **options)
            return [[float((i + j) % 3 == 0 and (groups is None or i in groups))
                     for j in range(len(group))] for i, group in enumerate(rewards)], counts
        monkeypatch.setattr(data, "grade", grade)
    rewards_grade = data.grade
    mixed()
    return mixed


@pytest.fixture
def copy(tmp_path):
    """A copy of the project that a test may change."""
    for path in [*ROOT.glob("*.py"), *(ROOT / name for name in (
            "analysis", "data", "docs", "engine", "examples", "experiment", "graders", "study"))]:
        into = tmp_path / path.name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, into)
    return tmp_path
