"""train.py --check: every row is right for the embedded base, and each fault fails its own."""

from types import SimpleNamespace

import pytest
import torch

import train
from engine import parallel
from engine.hf_sampler import TransformersSampler
from graders import worker
from harness import check
from helpers import needs_vllm, torchrun, write_rows

AT_FIRST, AT_07, AFTER_SYNC = (
    f"log probabilities of sampler and trainer, {when}"
    for when in ("first weights", "T = 0.7", "after two more weight syncs"))
ENDS = "completions end with one of 1 '<eos>'"
MIXED = "some completions are right and some wrong"
FLAGS = "--check --sampler transformers --problems_per_rollout 4 --eval_problems 16".split()


def failing(capsys, *flags):
    """-> the subjects of the rows that fail, of six."""
    with pytest.raises(SystemExit) as stop:
        train.main([*FLAGS, *flags])
    said = [line for line in capsys.readouterr().out.splitlines()
            if line[:6] in (" ok   ", "FAIL  ")]
    failed = sorted(line[6:].split(":")[0] for line in said if line.startswith("FAIL"))
    assert stop.value.code == (1 if failed else 0) and len(said) == 6
    return failed


def test_all_is_right_with_the_embedded_base_and_no_folder_is_made(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--loss", "p3o"], ["--loss", "ar_lopti"], ["--loss", "passk"]):
        assert failing(capsys, *flags) == []
    assert not list(tmp_path.iterdir())


load_weights, generate, weights = (
    TransformersSampler.load_weights, TransformersSampler.generate, parallel.weights)


def losing(kept):
    """A sync without the weights for which kept(name, number of the sync) is false."""
    def load(self, weights):
        self.syncs = getattr(self, "syncs", 0) + 1
        load_weights(self, [(name, w) for name, w in weights if kept(name, self.syncs)])
    return load


def without_adapters(policy, merged):
    for name, value in weights(policy, merged):
        base_layer = name.replace("down_proj.weight", "down_proj.base_layer.weight")
        yield name, policy.model.state_dict().get(base_layer, value)


def other_weights(self, weights):
    load_weights(self, weights)
    with torch.no_grad():
        self.model.get_output_embeddings().weight.mul_(1.05)


def without_eos(self, *args):
    completions = generate(self, *args)
    for c in completions:
        if not c.truncated:
            c.tokens, c.logprobs = c.tokens[:-1], c.logprobs[:-1]
    return completions


SYNC, GENERATE = (TransformersSampler, "load_weights"), (TransformersSampler, "generate")
BFLOAT16 = "--dtype bfloat16 --tokens_per_micro_batch 1024"


@pytest.mark.parametrize("owner, name, broken, flags, rows", [
    (*SYNC, losing(lambda name, sync: "lm_head" not in name), "", [AFTER_SYNC]),
    (*SYNC, losing(lambda name, sync: "lm_head" not in name), BFLOAT16, [AFTER_SYNC]),
    (*SYNC, losing(lambda name, sync: "layers.1." not in name), BFLOAT16, [AFTER_SYNC]),
    (*SYNC, losing(lambda name, sync: False), BFLOAT16, [AFTER_SYNC]),
    (*SYNC, losing(lambda name, sync: sync == 1), BFLOAT16, [AFTER_SYNC]),
    # adapters are 0 when a run starts: the check gives them noise
    (parallel, "weights", without_adapters, "--lora_rank 2", [AFTER_SYNC]),
    (*SYNC, other_weights, "", [AT_07, AFTER_SYNC, AT_FIRST]),
    (*GENERATE, lambda *given: generate(*given[:-1], (1.0, *given[-1][1:])), "", [AT_07]),
    (*GENERATE, without_eos, "", [ENDS, MIXED]),
    (parallel, "memory", lambda: 1e8, "", ["memory of an update of 4 x 48 tokens"]),
], ids=["lm_head", "lm_head in 16 bits", "a layer", "all", "all but once", "adapters", "weights",
        "temperature", "eos", "memory"])
def test_a_fault_fails_its_row(owner, name, broken, flags, rows, capsys, monkeypatch):
    monkeypatch.setattr(check, "PROMPTS", 8)
    monkeypatch.setattr(owner, name, broken)
    assert failing(capsys, *flags.split()) == rows


def test_completions_that_cannot_end_and_problems_of_which_none_is_solved(base, capsys, tmp_path):
    assert ENDS in failing(capsys, "--max_tokens", "6")
    path = write_rows(tmp_path / "own.jsonl", [
        dict(prompt=f"{i}=", answer="123454321", verifier="math") for i in range(20)])
    assert failing(capsys, "--data", path, "--eval_every", "0") == [MIXED]
    unread, failed = (worker.Fault(kind, "") for kind in ("unparsed_answer", "error"))
    for rewards, fault, mixed in (([0.5, 0.1], None, True), ([0.5, 0.5], None, False),  # fractions
                                  ([0.5, 0.0], unread, True), ([0.5, 0.0], failed, False)):
        group = SimpleNamespace(rewards=rewards, faults=[None, fault], texts=["a", "b"], prompt=[1],
                                problem=dict(answer="5"))
        s = SimpleNamespace(groups=[group], tokenizer=SimpleNamespace(decode=str))
        (_, figure, right, _), = check.check_rewards(s)
        assert right is mixed and figure.startswith("0 of 64 right")


@needs_vllm
def test_under_torchrun_with_vllm(base):
    done = torchrun(2, "train.py", "--check", "--problems_per_rollout", "4", "--eval_problems",
                    "16", "--sampler", "vllm")
    assert done.stdout.count(" ok   ") == 6 and "all of it is as it should be" in done.stdout
