"""train.py --check: every row is right for the embedded base, and fails when what it looks at is
broken."""

import json

import pytest
import torch

import losses
import train
from engine import parallel, policy
from engine.hf_sampler import TransformersSampler
from engine.sampler import has_vllm
from harness import check, refusals
from helpers import torchrun

AFTER_SYNC = "log probabilities of sampler and trainer, after two more weight syncs"
FLAGS = "--check --sampler transformers --problems_per_rollout 4 --eval_problems 16".split()


def failing(capsys, *flags):
    """-> the subjects of the rows that fail, of nine."""
    with pytest.raises(SystemExit) as stop:
        train.main([*FLAGS, *flags])
    said = [line for line in capsys.readouterr().out.splitlines()
            if line[:6] in (" ok   ", "FAIL  ")]
    failed = sorted(line[6:].split(":")[0] for line in said if line.startswith("FAIL"))
    assert stop.value.code == (1 if failed else 0) and len(said) == 9
    return failed


def test_all_is_right_with_the_embedded_base(base, capsys):
    assert failing(capsys) == []


def test_rounding_in_16_bits_is_no_fault_of_the_method(base, capsys, monkeypatch):
    """The split is computed in float32, frozen layers beside adapters, too."""
    seen, own = [], check.gradient

    def gradient(s, *given):
        seen.append({p.dtype for p in s.policy.parameters()} | {s.policy.dtype})
        return own(s, *given)
    monkeypatch.setattr(check, "gradient", gradient)
    few = ("--dtype", "bfloat16", "--tokens_per_micro_batch", "1024")
    for flags in ([], ["--lora_rank", "2"]):
        assert failing(capsys, *few, *flags) == []
    assert seen == [{torch.float32, "float32"}] * 4


def test_no_folder_is_made_and_other_methods_can_be_checked(base, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for loss in ("p3o", "ar_lopti", "passk"):
        assert failing(capsys, "--loss", loss) == []
    assert not list(tmp_path.iterdir())


def test_a_stale_head(base, capsys, monkeypatch):
    own = TransformersSampler.load_weights
    monkeypatch.setattr(TransformersSampler, "load_weights", lambda self, weights: own(
        self, [(n, w) for n, w in weights if n != "lm_head.weight"]))
    assert failing(capsys) == [AFTER_SYNC]


def test_a_sync_that_loses_something_shows_in_bfloat16_too(base, capsys, monkeypatch):
    own, calls, few = TransformersSampler.load_weights, [], ["--tokens_per_micro_batch", "1024"]
    kept = [lambda n: True, lambda n: False, lambda n: "lm_head" not in n,
            lambda n: "layers.1." not in n, lambda n: len(calls) == 1]

    def load_weights(self, weights):
        calls.append(1)
        own(self, [(n, w) for n, w in weights if keeps(n)])
    monkeypatch.setattr(TransformersSampler, "load_weights", load_weights)
    for keeps in kept:
        calls.clear()
        assert failing(capsys, "--dtype", "bfloat16", *few) == [AFTER_SYNC] * (keeps is not kept[0])


def test_an_adapter_that_is_lost(base, capsys, monkeypatch):
    """Adapters are 0 when a run starts: the check gives them noise."""
    flags = ["--lora_rank", "2"]
    assert failing(capsys, *flags) == []
    own = parallel.weights

    def weights(policy):
        for name, value in own(policy):
            base_layer = name.replace("down_proj.weight", "down_proj.base_layer.weight")
            yield name, policy.model.state_dict().get(base_layer, value)
    monkeypatch.setattr(parallel, "weights", weights)
    assert failing(capsys, *flags) == [AFTER_SYNC]


def test_a_wrong_temperature(base, capsys, monkeypatch):
    own = TransformersSampler.generate
    monkeypatch.setattr(TransformersSampler, "generate", lambda *given: own(
        *given[:-1], (1.0, *given[-1][1:])))
    assert failing(capsys) == ["log probabilities of sampler and trainer, T = 0.7"]


def test_other_weights_in_the_sampler(base, capsys, monkeypatch):
    own = TransformersSampler.__init__

    def init(self, *args, **kw):
        own(self, *args, **kw)
        with torch.no_grad():
            self.model.get_output_embeddings().weight.mul_(1.05)

    monkeypatch.setattr(TransformersSampler, "__init__", init)
    assert failing(capsys) == ["log probabilities of sampler and trainer, T = 0.7",
                               "log probabilities of sampler and trainer, first weights"]


def test_missing_eos(base, capsys, monkeypatch):
    own = TransformersSampler.generate

    def generate(self, *args):
        out = own(self, *args)
        for c in out:
            if not c.truncated:
                c.tokens, c.logprobs = c.tokens[:-1], c.logprobs[:-1]
        return out

    monkeypatch.setattr(TransformersSampler, "generate", generate)
    assert "completions end with one of 1 '<eos>'" in failing(capsys)
    monkeypatch.undo()
    none_can_end = failing(capsys, "--max_tokens", "6")
    assert "completions end with one of 1 '<eos>'" in none_can_end


def file_of(tmp_path, answers):
    path = tmp_path / "own.jsonl"
    rows = [dict(prompt=f"{i}=", answer=x, verifier="math") for i, x in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_gold_answer_that_does_not_parse(base, capsys, tmp_path):
    broken = file_of(tmp_path, ["123454321"] * 19 + ["\\frac{1}{"])
    # the base solves none of these either, which is another row's business
    assert failing(capsys, "--data", broken, "--eval_every", "0") == [
        "gold answers can be graded", "some completions are right and some wrong"]
    whole = file_of(tmp_path, ["123454321"] * 20)
    assert failing(capsys, "--data", whole, "--eval_every", "0") == [
        "some completions are right and some wrong"]


def test_a_verifier_that_takes_everything(base, capsys, monkeypatch):
    monkeypatch.setattr(check, "grade", lambda problems, texts: ([[1.0] for _ in texts], {}))
    assert failing(capsys) == ["a wrong answer grades as wrong"]


def test_a_gradient_that_depends_on_the_split(base, capsys, monkeypatch):
    wrong = ["the gradient does not depend on the micro-batches"]
    # every micro-batch by its own denominators
    monkeypatch.setattr(policy, "step_size", lambda mask, max_tokens, group: None)
    assert failing(capsys) == wrong
    monkeypatch.undo()
    assert failing(capsys, "--loss", "acpo") == []
    monkeypatch.delattr(losses.acpo, "whole_step")
    monkeypatch.setattr(refusals, "check_method", lambda *_, **__: None)  # which refuses it
    assert failing(capsys, "--loss", "acpo") == wrong


def test_too_little_memory(base, capsys, monkeypatch):
    monkeypatch.setattr(parallel, "memory", lambda: 1e8)
    assert failing(capsys) == ["memory of an update of 85 x 48 tokens"]


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_under_torchrun_with_vllm(base):
    done = torchrun(2, "train.py", "--check", "--problems_per_rollout", "4", "--eval_problems",
                    "16", "--sampler", "vllm")
    assert done.stdout.count(" ok   ") == 9 and "all of it is as it should be" in done.stdout
