"""What a run's numbers depend on: its row's and verifiers' code by name, its weights' checksum."""

import ast
import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

import eval as evaluation
import train
from harness import checksums
from harness.checkpoint import differing
from helpers import refused

OWN = '''
def helper(x):
    return x + 1

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
    ("x + 1", "x + 2", {"helper"}), ("[0]", "[3]", {"row"}), ("x: 1", "x: 3", {"ROWS['a']"}),
    ("@marked\n", "", {"row"}), ("number = 2", "number = 3", {"Kind"}),
    ("return helper(x)\n", "return 2 * helper(x)\n", set()), ("Kind(other)}", "0}", set()),
    ("calls a", "calls no", set()), ("x + 1", "(x\n            + 1)  # more", set())])
def test_an_edit_counts_where_it_is_reached(old, new, changed):
    before, after = (checksums.reached(ast.parse(text), ["ROWS['a']", "gone", None])
                     for text in (OWN, OWN.replace(old, new, 1)))
    assert before.keys() == after.keys() == {"ROWS['a']", "row", "helper", "Kind"}
    assert set(differing(before, after)) == changed
    assert {"ROWS['mine']", "other"} < {*checksums.reached(ast.parse(OWN), ["ROWS['mine']"])}


@pytest.mark.quick
def test_what_rows_corrections_and_verifiers_reach():
    def of(name, roots):
        return {*checksums.reached(ast.parse(checksums.CODE[name]), roots)}

    def of_flags(*argv):
        return of("losses.py", train.parse_args(argv)[0].roots)
    grpo, helpers = of_flags(), {"token_mask", "sampler_log_ratio", "within"}
    assert {"METHODS['grpo']", "zscore", "ppo_clip", "seq_mean", "Tokens", "loss_terms",
            "group_advantages"} < grpo
    assert not grpo & {"METHODS['dapo']", "fade", "gspo", "card"}
    assert of_flags("--select", "own,token_mask") - grpo == helpers
    assert of_flags("--aggregate", "constant") - grpo == {"constant"}
    assert "arithmetic" in of("rewards.py", ["REWARDS['countdown']"])


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
    assert "was begun with weights of --model" in refused(capsys, evaluation.main, *argv)
    settings = tmp_path / "out" / "settings.json"
    known = json.loads(settings.read_text())
    settings.write_text(json.dumps({**known, "weights of --model": None}))
    evaluation.main(argv)  # they could not be read
