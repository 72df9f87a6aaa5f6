"""What only a GPU does, as far as a CPU can tell: the order of calls to a sleeping engine, the
arithmetic of memory, frozen weights in half precision, LoRA's settings."""

import dataclasses
import inspect
import json
import os
import re
from types import SimpleNamespace

import pytest
import torch

import eval as evaluation
import train
from engine import hf_sampler, kernels, loading, parallel, policy, sampler, vllm_settings
from engine.sampler import Completion, VLLMSampler, has_vllm
from engine.trainer import Trainer
from harness import model
from harness.failures import RunFailed, room_for
from helpers import run, torchrun
from ranks import load, rollout

# ---------------------------------------------------------------------------- the engine's sleep

class FakeEngine:
    def __init__(self, answer=True):
        self.calls, self.answer = [], answer

    def __getattr__(self, name):
        def call(*args, **kw):
            self.calls.append((name, kw.get("level") or kw.get("tags") or args[:1]))
            return self.answer
        return call


def test_the_engine_wakes_in_two_stages_around_the_weights(monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(parallel, "watch_memory", lambda: None)
    sampler = VLLMSampler.__new__(VLLMSampler)
    sampler.engine, sampler.sleeps, sampler.asleep = FakeEngine(), True, False
    sampler.sleep()
    sampler.sleep()  # nothing more
    sampler.wake()
    sampler.load_weights([])
    sampler.load_weights([])
    load, forget = ("collective_rpc", ("reload_weights",)), ("reset_prefix_cache", ())
    assert sampler.engine.calls == [("sleep", 2), ("wake_up", ["weights"]), load,
                                    ("wake_up", ["kv_cache"]), forget, load, forget]
    sampler.engine.answer = False  # vLLM's, where blocks are held
    with pytest.raises(RuntimeError, match="keys and values of the old weights"):
        sampler.load_weights([])


@pytest.mark.parametrize("gpu", [False, True])
def test_sampling_leaves_the_states_of_this_process_alone(gpu, base, monkeypatch):
    """torch.random.fork_rng without its devices would take all GPUs of the node, with a warning."""
    forked, fork = [], torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: (
        forked.append(devices), fork([]))[1])
    engine = VLLMSampler.__new__(VLLMSampler)
    engine.vllm, engine.eos, engine.sleeps = SimpleNamespace(SamplingParams=dict), [1], gpu
    engine.stop, engine.engine = None, FakeEngine([])
    state = torch.get_rng_state()
    engine.sample([[1]], 2, seed=0, temperature=1.0, max_tokens=3)
    assert forked == [[parallel.device()] if gpu else []]
    own = sampler.make_sampler("transformers", base, dtype="float32", eos=[1])
    own.sample([[5, 6]], 2, seed=0, temperature=1.0, max_tokens=3)
    assert torch.equal(torch.get_rng_state(), state) and len(forked) == 1


def test_in_a_run_it_sleeps_before_scoring_and_gradients_are_gone_when_it_wakes(
        base, tmp_path, monkeypatch):
    calls = []

    def note(owner, name):
        own = getattr(owner, name)

        def call(first, *args, **kw):
            calls.append((name, first))
            if name == "wake":
                policy = dict(calls)["compute_logprobs"]
                assert all(p.grad is None for p in policy.parameters())
            return own(first, *args, **kw)
        monkeypatch.setattr(owner, name, call)
    for name in ("sleep", "wake", "load_weights"):
        note(hf_sampler.TransformersSampler, name)
    note(train, "compute_logprobs")
    run(base, tmp_path / "run", "--rollout_lag", "1", "--rollouts", "3", "--eval_every", "0",
        "--drop_uniform_groups", "--max_refills", "1")
    score, sync = "compute_logprobs", ["wake", "load_weights"]
    # the first rollout is sampled together with the second, which is learnt from later
    assert [name for name, _ in calls] == ["sleep", score, score, *sync, "sleep", score, *sync,
                                           "sleep", *sync]


def fake_cuda(monkeypatch, **functions):
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)


def test_peak_memory_leaves_out_what_a_sleeping_engine_has_given_back(monkeypatch):
    """torch counts 50 GB that vLLM has unmapped; the trainer goes from 10 GB to 25."""
    gpu = dict(free=70e9, allocated=60e9, peak=0)
    fake_cuda(monkeypatch, is_available=lambda: True, mem_get_info=lambda: (gpu["free"], 80e9),
              memory_allocated=lambda: gpu["allocated"], max_memory_allocated=lambda: gpu["peak"],
              reset_peak_memory_stats=lambda: gpu.update(peak=gpu["allocated"]))
    monkeypatch.setattr(parallel, "UNCOUNTED", 0)
    parallel.watch_memory()
    assert parallel.peak_memory() == 10e9
    gpu["peak"] = 75e9
    assert parallel.peak_memory() == 25e9


def test_the_state_is_counted_with_its_copies(small):
    p = load(small())
    n = sum(x.numel() for x in p.parameters())
    assert loading.state_bytes(p, False) == 16 * n
    p.dtype = "bfloat16"
    assert loading.state_bytes(p, False) == 18 * n  # autocast's copies


# ---------------------------------------------------------------------------- passes over tensors

PROBE = policy.make_batch([([1], [Completion([5] * n, [0.0], False) for n in (4, 3, 2, 1)])])


def forward_and_gradient(p, batch):
    """-> log probabilities, entropies and all gradients in one tensor."""
    outputs = p(batch)
    (outputs[0].sum() + 0.3 * outputs[1].sum()).backward()
    gradients = [x.grad.flatten() for x in p.parameters() if x.requires_grad]
    return torch.cat([*(x.detach().flatten() for x in outputs), *gradients])


@pytest.mark.parametrize("temperature, divisions", [(1.0, 0), (0.7, 3)])
def test_a_temperature_of_1_divides_nothing(temperature, divisions, monkeypatch):
    """Forward, and again and for the gradient in the backward pass: the same bits without."""
    seen, own = [], torch.Tensor.div_
    monkeypatch.setattr(torch.Tensor, "div_", lambda *given: (seen.append(given), own(*given))[1])
    g = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=g, requires_grad=True) for n in (9, 30))
    logprobs, _ = kernels.HeadLogprobs.apply(hidden, weight, None, torch.arange(9), temperature)
    logprobs.sum().backward()
    assert len(seen) == divisions
    plain = (hidden @ weight.T / temperature).log_softmax(-1).diagonal()
    assert torch.allclose(logprobs, plain, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_head_in_float32_rounds_no_logits(dtype):
    """Factors have 16 bits, as vLLM's with its head_dtype; sums and log probabilities do not."""
    g, dtype = torch.Generator().manual_seed(0), getattr(torch, dtype)
    hidden, weight = torch.randn(50, 64, generator=g), torch.randn(300, 64, generator=g)
    bias, ids = torch.randn(300, generator=g), torch.arange(50)
    exact = hidden.to(dtype).double() @ weight.to(dtype).double().T + bias.to(dtype).double()
    found, gradients = [], []
    for wide in (True, False):
        w = weight.clone().requires_grad_()
        with torch.autocast("cpu", dtype):
            logprobs = kernels.HeadLogprobs.apply(hidden, w, bias, ids, 1.0, wide)[0]
        logprobs.sum().backward()
        found.append((logprobs - exact.log_softmax(-1)[ids, ids]).abs().max().item())
        gradients.append(w.grad)
    assert found[0] < 2e-5 and found[1] > 20 * found[0]
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()
    assert kernels.head_logits(hidden, weight, wide=True).equal(hidden @ weight.T)  # of float32


@pytest.mark.parametrize("flags, wanted", [
    (["--dtype", "bfloat16"], "float32"), (["--dtype", "float32"], "model"),
    (["--dtype", "float16", "--head_dtype", "model"], "model")])
def test_the_dtype_of_the_head_is_one_for_both_sides(flags, wanted, monkeypatch):
    args, method = train.parse_args(flags)
    assert args.head_dtype == evaluation.parse_args(flags).head_dtype == wanted
    seen = []
    for owner in (model, evaluation):
        monkeypatch.setattr(owner, "make_sampler", lambda *_, **settings: seen.append(settings))
    monkeypatch.setattr(loading, "load", lambda *_, **settings: (seen.append(settings), full_gpu()))
    model.load_sampler(args, [1])
    evaluation.load_model(evaluation.parse_args(flags), [dict(prompt="1", verifier="", id="")])
    monkeypatch.setattr(model.data, "encode", lambda *_: [1] * 64)
    with pytest.raises(RunFailed):
        model.load_trainer(args, method, None, [1], None)
    assert [settings["head_dtype"] for settings in seen] == [wanted] * 3


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=pytest.mark.skipif(
    not has_vllm(), reason="vllm is not installed"))])
def test_sampler_and_trainer_agree_better_with_a_head_in_float32(kind, base, tmp_path):
    gaps = {}
    for head in ("model", "float32"):
        records = run(base, tmp_path / head, "--rollouts", "1", "--dtype", "bfloat16",
                      "--sampler", kind, "--head_dtype", head, "--eval_every", "0")
        gaps[head] = records[-1]["sampler/logp_absdiff_mean"]
    assert 0 < gaps["float32"] < 0.9 * gaps["model"], gaps  # 0.5 to 0.85, by the CPU


# ---------------------------------------------------------------------------- LoRA, frozen weights

@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_frozen_layers_in_half_precision_give_the_same_bits(small, dtype):
    """Autocast computes in them anyhow; the master copy of what is never changed is not needed."""
    halved, whole = lora(small(), dtype), lora(small())
    assert {x.dtype for x in halved.parameters()} == {getattr(torch, dtype), torch.float32}
    assert {x.dtype for x in whole.parameters()} == {torch.float32}
    whole.dtype = dtype
    assert torch.equal(*(forward_and_gradient(p, rollout(101)) for p in (halved, whole)))


def lora(model, dtype="float32", rank=4, **options):
    torch.manual_seed(0)
    p = loading.load(model, [1], PROBE, budget=60, dtype=dtype, lora_rank=rank, **options)
    with torch.no_grad():
        for name, x in p.named_parameters():
            if "lora_B" in name:
                x.normal_(std=0.02)
    return p


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_without_its_adapters_is_the_initial_one(small, dtype):
    """The same bits as a second model, which takes its memory; the adapters learn all the same."""
    folder = small()
    p, batch = lora(folder, dtype), rollout(101)
    second = loading.load(folder, [1], PROBE, budget=60, dtype=dtype, frozen=True)
    found = policy.compute_logprobs(loading.WithoutAdapters(p), batch)
    assert all(map(torch.equal, found, policy.compute_logprobs(second, batch)))
    assert not torch.equal(found[0], policy.compute_logprobs(p, batch)[0])
    p(batch)[0].sum().backward()
    assert all(x.grad is not None for x in p.parameters() if x.requires_grad)
    assert any(x.requires_grad for x in p.parameters())


def test_adapters_are_scaled_by_alpha_over_rank(small):
    plain, *adapted = (dict(parallel.weights(p))["model.layers.0.mlp.up_proj.weight"] for p in (
        load(small()), lora(small(), lora_alpha=4), lora(small(), lora_alpha=8)))
    once, twice = (weight - plain for weight in adapted)
    assert once.norm() > 0 and torch.allclose(2 * once, twice, atol=1e-6)


def test_lora_has_ten_times_the_learning_rate_unless_one_is_given():
    assert train.parse_args(["--lora_rank", "1"])[0].lr == pytest.approx(5e-4)
    args, _ = train.parse_args(["--lora_rank", "1", "--model", "x"])
    assert args.lr == pytest.approx(1e-5) and "ten times" in args.origin["lr"]
    assert train.parse_args(["--lora_rank", "1", "--lr", "1e-4"])[0].lr == 1e-4


def test_a_budget_is_measured_on_sharded_weights(small, tmp_path, monkeypatch):
    """load under torchrun finds the same activations for a token as without."""
    code, folder, few, kept_bytes = tmp_path / "budget.py", small(), [], loading.kept_bytes
    monkeypatch.setattr(loading, "kept_bytes", lambda *a: few.append(kept_bytes(*a)) or few[-1])
    loading.load(folder, [1], rollout(101), longest=64)
    (a, m), (b, n) = few
    code.write_text(
        "import sys; sys.path[:0] = ['tests', '.']\n"
        "from engine import loading, parallel\nimport ranks\n"
        "parallel.start()\nfew = []\nown = loading.kept_bytes\n"
        "loading.kept_bytes = lambda *a: few.append(own(*a)) or few[-1]\n"
        "loading.load(sys.argv[1], [1], ranks.rollout(101), longest=64)\n"
        "(a, m), (b, n) = few\nparallel.say(f'each {(b - a) / (n - m):.6f}')\nparallel.stop()\n")
    sharded = re.findall("^each.*", torchrun(2, code, folder).stdout, re.M)
    assert sharded == [f"each {(b - a) / (n - m):.6f}"]


def test_the_chunk_of_the_head_is_larger_on_a_gpu(small, monkeypatch):
    """What is computed does not depend on it: test_policy.py."""
    assert loading.load(small(), [1], PROBE).chunk == loading.head_chunk() == kernels.CHUNK
    monkeypatch.setattr(parallel, "device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(parallel, "memory", lambda: 80e9)
    assert 2**27 < loading.head_chunk() < 2**29


# ---------------------------------------------------------------------------- set-up

@pytest.mark.parametrize("cuda, named", [
    (None, "is built without CUDA: pip install"), ("13.0", "driver may be too old for CUDA 13.0")])
def test_a_gpu_that_torch_cannot_use_is_a_sentence(cuda, named, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert parallel.unusable_gpu() is None  # there is none here
    monkeypatch.setattr(parallel.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    for parse in (train.parse_args, evaluation.parse_args):
        with pytest.raises(SystemExit) as stop:
            parse([])
        assert stop.value.code == 2 and named in capsys.readouterr().err
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train.parse_args([])[0].dtype == "float32"


def test_the_sampler_is_vllm_on_a_gpu_alone(monkeypatch):
    args, _ = train.parse_args([])
    assert args.sampler == evaluation.parse_args([]).sampler == "transformers"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for installed in (True, False):
        monkeypatch.setattr(sampler, "has_vllm", lambda installed=installed: installed)
        assert sampler.default_kind() == ("vllm" if installed else "transformers")


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_the_dtype_is_what_the_gpu_has(capability, dtype, monkeypatch):
    fake_cuda(monkeypatch, is_available=lambda: True, get_device_capability=lambda: capability)
    assert parallel.default_dtype() == dtype


def test_deterministic_sets_what_it_says(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    fake_cuda(monkeypatch, is_available=lambda: True)
    try:
        parallel.start(deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        assert "VLLM_BATCH_INVARIANT" not in os.environ
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    finally:
        torch.use_deterministic_algorithms(False)


# ---------------------------------------------------------------------------- a GPU that is full

def full_gpu(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
                                 "total capacity of 79.15 GiB of which 1.20 GiB is free.")


@pytest.mark.parametrize("owner, name, said", [
    (hf_sampler.TransformersSampler, "sample", "sample"), (train, "compute_logprobs", "logp"),
    (Trainer, "step", "update"), (hf_sampler.TransformersSampler, "load_weights", "sync"),
    (train, "evaluate", "eval"), (loading, "load", "loading"),
    (hf_sampler.TransformersSampler, "__init__", "loading")])
def test_a_full_gpu_is_a_sentence_with_the_phase_and_two_flags(owner, name, said, base, tmp_path,
                                                               monkeypatch):
    monkeypatch.setattr(owner, name, full_gpu)
    words = f"^the GPU's memory is full in the phase {said} .*2.00 GiB.* make roo"
    with pytest.raises(RunFailed, match=words) as failed:
        run(base, tmp_path / "run", "--rollouts", "1", "--eval_every",
            str(int(name == "evaluate")))
    flags = re.findall(r"--(\w+)", str(failed.value))
    assert len(flags) == 2 and {*flags} <= {*vars(train.parse_args([])[0])}


@pytest.mark.parametrize("message, kind", [
    ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", RunFailed),
    ("vLLM still holds keys and values of the old weights", RuntimeError)])
def test_a_full_gpu_when_the_engine_wakes(message, kind):
    """The error of vLLM's allocator is no torch.OutOfMemoryError; other errors stay as they are."""
    said = "in the phase sync .*cumem.*--lora_rank 16 or fewer" if kind is RunFailed else message
    with pytest.raises(kind, match=said) as failed, room_for("sync"):
        raise RuntimeError(message)
    assert type(failed.value) is kind


def test_a_full_gpu_in_an_evaluation(base, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hf_sampler.TransformersSampler, "sample", full_gpu)
    with pytest.raises(SystemExit) as stop:
        evaluation.main(["--model", base, "--limit", "2", "--out", str(tmp_path)])
    assert stop.value.code == 1 and "full in the phase sample" in capsys.readouterr().err


def free_bytes(monkeypatch, free, total):
    fake_cuda(monkeypatch, is_available=lambda: True, mem_get_info=lambda *_: (free, total),
              memory_reserved=lambda: 1e9, empty_cache=lambda: None)


@pytest.mark.parametrize("free, total, share, sequences, small", [
    (80e9, 80e9, 0.9, 1024, False), (40e9, 80e9, 0.48, 1024, False), (12e9, 24e9, 0.48, 256, True)])
def test_an_engine_goes_by_the_memory_that_is_free(free, total, share, sequences, small,
                                                   monkeypatch):
    free_bytes(monkeypatch, free, total)
    assert parallel.usable_memory() == free + 1e9
    found = vllm_settings.of_this_machine(None, None, 64)
    assert found["gpu_memory_utilization"] == pytest.approx(share)
    assert found["max_num_seqs"] == sequences and found["sleep_mode_offload_cudagraph"] is small
    graphs = found["compilation_config"]["cudagraph_capture_sizes"]
    assert graphs[-1] == sequences and graphs[:4] == [1, 2, 4, 8] and len(graphs) < 15
    found = vllm_settings.of_this_machine(0.1, 100, 64)
    assert found["compilation_config"]["cudagraph_capture_sizes"][-2:] == [64, 100]


def test_an_engine_that_does_not_fit_is_a_sentence(base, monkeypatch, capsys):
    args = evaluation.parse_args([])
    free_bytes(monkeypatch, 0.3e9, 24e9)
    args.sampler, problem = "vllm", dict(prompt="1", verifier="math", answer="1", id="0")
    with pytest.raises(SystemExit) as stop:
        evaluation.load_model(args, [problem])
    told = capsys.readouterr().err
    assert stop.value.code == 2 and "0.3 of the GPU's 24.0 GB are free" in told
    with pytest.raises(ValueError, match="it is to take 9.6 GB; .*--gpu_memory_utilization"):
        vllm_settings.of_this_machine(0.4, None, 64)


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_vllm_takes_the_arguments_of_a_gpu(monkeypatch):
    """Those that the CPU's engine does not get; an upgrade that renames one fails here."""
    import vllm
    from vllm.config import CompilationConfig
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    own, given = vllm.LLM, {}
    free_bytes(monkeypatch, 20e9, 24e9)
    monkeypatch.setattr(vllm, "LLM", lambda _, **settings: given.update(settings))
    VLLMSampler("m", dtype="bfloat16", max_length=64, eos=[1], tp=2, head_dtype="float32")
    named = {*inspect.signature(own.__init__).parameters}
    more = {name for name in given if name not in named}  # **kwargs goes to EngineArgs
    assert more <= {f.name for f in dataclasses.fields(vllm.EngineArgs)}, more
    assert {"enable_sleep_mode", "sleep_mode_offload_cudagraph", "compilation_config"} <= {*given}
    graphs = CompilationConfig(**given["compilation_config"])
    assert graphs.cudagraph_capture_sizes[-1] == 256
    assert hasattr(vllm.config.ModelConfig, "head_dtype")  # which hf_overrides sets
    worker = gpu_worker.Worker
    for function, names in {
            own.sleep: ["level"], own.wake_up: ["tags"], own.collective_rpc: ["method", "kwargs"],
            own.reset_prefix_cache: [], worker.sleep: ["level"], worker.wake_up: ["tags"],
            worker.reload_weights: ["kwargs"],
            GPUModelRunner.reload_weights: ["weights_iterator"]}.items():
        assert {*names} <= {*inspect.signature(function).parameters}, function


def test_torch_has_what_a_gpu_needs():
    """What a CPU runs, too, needs no such test; varlen_attn's arguments are in test_layout.py."""
    cuda = torch.cuda
    assert all(map(callable, (cuda.mem_get_info, cuda.memory_reserved, cuda.memory_allocated)))
    assert "device" in inspect.signature(cuda.get_device_capability).parameters
    assert any("out_dtype" in str(s) for s in torch._C._jit_get_schemas_for_operator("aten::mm"))
    assert issubclass(torch.OutOfMemoryError, RuntimeError)


def test_eval_uses_all_ranks_and_continues(base, tmp_path, monkeypatch):
    """Two ranks stopped after a chunk, continued by one: every problem has its completions once."""
    flags = ["--model", base, "--limit", "12", "--samples", "2", "--sampler", "transformers"]
    code, chunks, append = tmp_path / "small_chunks.py", [], evaluation.append
    code.write_text(
        "import sys; sys.path.insert(0, '.')\n"
        "import eval\neval.AT_ONCE = 4\nown, chunks = eval.append, []\n"
        "def append(path, rows):\n"
        "    own(path, rows); chunks.append(len(rows))\n"
        "    if len(chunks) == 2: raise OSError('end')\n"
        "eval.append = append\neval.main(sys.argv[1:])\n")
    done = torchrun(2, code, *flags, "--out", tmp_path / "out", check=False)
    assert done.returncode and "eval.py: end" in done.stderr
    path = tmp_path / "out" / "completions.jsonl"
    assert path.read_text().count("completion\"") == 16  # two chunks of 4 problems x 2
    monkeypatch.setattr(evaluation, "AT_ONCE", 4)
    monkeypatch.setattr(evaluation, "append", lambda path, rows: (
        append(path, rows), chunks.append(len(rows))))
    evaluation.main([*flags, "--out", str(tmp_path / "out")])
    assert chunks == [4, 4]
    rows = list(map(json.loads, path.read_text().splitlines()))
    assert len(rows) == 24 and len({row["id"] for row in rows}) == 12
    result = json.loads((tmp_path / "out" / "eval.json").read_text())["results"]["countdown"]
    assert result["problems"] == 12 and result["samples"] == 2


@pytest.mark.skipif(not has_vllm(), reason="vllm is not installed")
def test_an_engine_without_problems_is_in_nobodys_way(base, tmp_path):
    torchrun(2, "eval.py", "--model", base, "--limit", "1", "--samples", "2", "--sampler", "vllm",
             "--out", tmp_path / "out")
    assert len((tmp_path / "out" / "completions.jsonl").read_text().splitlines()) == 2
