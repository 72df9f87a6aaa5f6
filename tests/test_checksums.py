"""What a run's numbers depend on: another definition that its row or verifier reaches, or other
weights, is another checksum; anything else is the same."""

import dataclasses
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import eval as evaluation
import rewards
from harness import checksums
from losses import METHODS


def of(name, correction=None):
    if name in rewards.REWARDS:
        return checksums.of_code([rewards.REWARDS[name].grade])
    return checksums.of_method(name, METHODS[name], correction)


@pytest.mark.quick
@pytest.mark.parametrize("module, name, here, elsewhere", [
    ("losses", "weigh_failures", ["fade", "asym"], ["power", "grpo", "countdown"]),
    ("losses", "TIED", ["top_entropy"], ["fade"]), ("losses", "opsm", ["opsm"], ["grpo"]),
    ("losses", "loss_terms", ["fade", "grpo"], ["math"]), ("losses", "measure", [], ["grpo"]),
    ("rewards", "same_cell", ["table"], ["math", "countdown"]),
    ("rewards", "OPERATORS", ["countdown"], ["math"]),
    ("graders.answers", "LONGEST", ["math"], ["table", "code"]),
    ("graders.sandbox", "run_tests", ["code"], ["math"]),
    ("graders.runner", "confine", ["code"], ["math"]),
], ids=str)
def test_an_edit_counts_where_it_is_reached(module, name, here, elsewhere, copy, monkeypatch):
    def of_all(text):
        file.write_text(text)
        checksums.definitions.cache_clear()
        return {x: of(x) for x in here + elsewhere}
    file, before = copy / (module.replace(".", "/") + ".py"), {x: of(x) for x in here + elsewhere}
    text, head = file.read_text(), f"\ndef {name}(" if name.islower() else f"\n{name} ="
    assert text.count(head) == 1
    monkeypatch.setattr(checksums, "ROOT", copy)
    try:
        reworded = re.sub(r'(\n    """)(?=\w)', r"\1Another text: ", text)
        assert of_all(reworded.replace(head, f"\n\n# a comment{head}")) == before
        after = of_all(text.replace(head, f"{head}changed, " if name.islower() else f"{head} 1 or"))
    finally:
        checksums.definitions.cache_clear()
    for each, sums in before.items():
        assert after[each].keys() == sums.keys()
        assert [x for x in sums if after[each][x] != sums[x]] == [
            f"{module}.{name}"] * (each in here)


@pytest.mark.quick
def test_rows_corrections_and_functions_without_a_file(monkeypatch):
    grpo = of("grpo")
    assert set(of("grpo", "token_mask")) - set(grpo) == {
        "losses.token_mask", "losses.sampler_log_ratio"}
    monkeypatch.setitem(METHODS, "grpo", dataclasses.replace(METHODS["grpo"],
                                                             preset=dict(eps_high=0.3)))
    now = of("grpo")
    assert [x for x in now if now[x] != grpo[x]] == ["losses.METHODS['grpo']"]
    one = checksums.of_code([lambda completion, answer: 1.0])
    two = checksums.of_code([lambda completion, answer: 2.0])
    assert one != two and one.keys() == two.keys()
    assert checksums.of_code([print]) == {}


@pytest.fixture
def folder(base, tmp_path):
    return shutil.copytree(base, tmp_path / "model")


def scaled(folder, factor=2.0):
    weights = load_file(folder / "model.safetensors")
    name = max(weights, key=lambda name: ".mlp." in name and weights[name].numel())
    weights[name] *= factor
    return weights


def test_other_weights_of_the_same_sizes_are_seen_in_every_kind_of_file(folder):
    first = checksums.of_weights(folder)
    weights = scaled(folder)
    names = sorted(weights)
    for i, some in enumerate((names[:5], names[5:]), 1):
        save_file({x: weights[x] for x in some}, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors").unlink()
    sharded = checksums.of_weights(folder)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    assert first != sharded == checksums.of_weights(folder)
    (folder / "pytorch_model.bin").write_bytes(b"no weights")
    assert checksums.of_weights(folder) is None is checksums.of_weights("no/such")


def test_an_evaluation_of_other_weights_is_not_continued(folder, tmp_path, capsys):
    argv = (f"--model {folder} --out {tmp_path}/out --sampler transformers --limit 2 --samples 2 "
            "--max_tokens 4 --max_prompt_tokens 32").split()
    evaluation.main(argv)
    evaluation.main(argv)
    save_file(scaled(folder), folder / "model.safetensors", metadata=dict(format="pt"))
    with pytest.raises(SystemExit) as stop:
        evaluation.main(argv)
    assert stop.value.code == 2 and "was begun with other weights in --model" in (
        capsys.readouterr().err)
    settings = tmp_path / "out" / "settings.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "weights": None}))
    evaluation.main(argv)  # of an earlier version
    assert json.loads(settings.read_text())["weights"] is None
