"""What a run's numbers depend on, functions of its row or verifier and weights, has a checksum."""

import dataclasses
import importlib
import json
import linecache
import shutil
import sys

import pytest
from safetensors.torch import load_file, save_file

import eval as evaluation
import rewards
from harness import checksums
from helpers import refused
from losses import METHODS

OWN = '''
def helper(x):
    return x + 1

def other(x):
    return helper(x)

def row(x):
    return [helper(y) for y in x] + [0]

both = (lambda x: 1,
        lambda x: 2)
'''


@pytest.mark.quick
@pytest.mark.parametrize("old, new, changed", [
    ("x + 1", "x + 2", {"helper"}), ("[0]", "[3]", {"row"}), ("x: 1", "x: 3", {"<lambda>"}),
    ("return helper(x)\n", "return 2 * helper(x)\n", set())])
def test_an_edit_counts_where_it_is_reached(old, new, changed, tmp_path, monkeypatch):
    def sums(text):
        (tmp_path / "own_rows.py").write_text(text)
        linecache.checkcache()
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, "own_rows", raising=False)
        module = importlib.import_module("own_rows")
        return checksums.of_functions([module.row, *module.both])
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before, after = sums(OWN), sums(OWN.replace(old, new, 1))
    assert before.keys() == after.keys() == {"row", "helper", "<lambda>"}
    assert {name for name in before if before[name] != after[name]} == changed


@pytest.mark.quick
def test_rows_corrections_and_functions_without_a_text(monkeypatch):
    def of(correction=None):
        return checksums.of_method("grpo", METHODS["grpo"], correction)
    grpo, helpers = of(), {"token_mask", "sampler_log_ratio"}
    assert {"zscore", "ppo_clip", "seq_mean", "Tokens", "loss_terms", "group_advantages"} < {*grpo}
    assert set(of("token_mask")) - set(grpo) == helpers
    changed = dataclasses.replace(METHODS["grpo"], preset=dict(eps_high=0.3))
    monkeypatch.setitem(METHODS, "grpo", changed)
    assert [x for x in grpo if of()[x] != grpo[x]] == ["METHODS['grpo']"]
    assert checksums.of_functions([print]) == {}
    assert "arithmetic" in checksums.of_functions([rewards.REWARDS["countdown"].grade])


@pytest.fixture
def folder(base, tmp_path):
    return shutil.copytree(base, tmp_path / "model")


def other_weights(folder):
    weights = {name: weight if "embed" in name else 2 * weight  # as adapters leave it
               for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata=dict(format="pt"))


def test_other_weights_of_the_same_sizes_are_seen_in_each_kind_of_file(folder):
    first = checksums.of_weights(folder)
    other_weights(folder)
    assert first != checksums.of_weights(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert checksums.of_weights(folder) not in (first, None)
    assert checksums.of_weights("no/such") is None


def test_an_evaluation_of_other_weights_is_not_continued(folder, tmp_path, capsys):
    argv = (f"--model {folder} --out {tmp_path}/out --sampler transformers --limit 2 --samples 2 "
            "--max_tokens 4 --max_prompt_tokens 32").split()
    evaluation.main(argv)
    evaluation.main(argv)
    other_weights(folder)
    assert "was begun with other weights in --model" in refused(capsys, evaluation.main, *argv)
    settings = tmp_path / "out" / "settings.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "checksum": None}))
    evaluation.main(argv)  # they could not be read
