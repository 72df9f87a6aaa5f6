"""What only a GPU does, as far as a CPU can tell: engines that sleep, full memory, float16."""

import dataclasses
import inspect
import re
from functools import partial
from itertools import count
from unittest.mock import ANY, Mock, call

import pytest
import torch

import eval as evaluation
import train
from engine import loading, parallel, policy, sampler, vllm_settings
from engine.forward import HeadLogprobs, head_logits
from engine.hf_sampler import TransformersSampler
from engine.sampler import VLLMSampler
from engine.trainer import NotFinite, Trainer, lr_factor
from harness.failures import RunFailed, room_for
from helpers import SMALL, needs_vllm, read_rows, refused, run, same, without
from losses import METHODS
from ranks import load, rollout
from test_policy import scored


def test_the_engine_wakes_in_two_stages_around_the_weights(monkeypatch):
    monkeypatch.setattr(parallel, "watch_memory", lambda: None)
    sampler, engine = VLLMSampler.__new__(VLLMSampler), Mock()
    sampler.engine, sampler.sleeps, sampler.asleep = engine, True, False
    sampler.model = torch.nn.Module()
    sampler.load_weights([])  # it is awake
    sampler.sleep()
    sampler.sleep()  # nothing more
    sampler.load_weights([])
    load, reset = call.collective_rpc("reload_weights", kwargs=ANY), call.reset_prefix_cache()
    assert engine.mock_calls == [
        load, reset, call.sleep(level=2), call.wake_up(tags=["weights"]), load,
        call.wake_up(tags=["kv_cache"]), reset]
    engine.reset_prefix_cache.return_value = False  # vLLM's answer, where blocks are held
    with pytest.raises(RuntimeError, match="keys and values of the old weights"):
        sampler.load_weights([])


def test_in_a_run_it_sleeps_while_the_trainer_needs_the_memory(base, tmp_path, monkeypatch):
    """And gradients are gone when it wakes. Two rollouts are sampled before the first update."""
    state = dict(asleep=False)

    def only_while(asleep, owner, name):
        own = getattr(owner, name)

        def call(first, *args, **kw):
            assert state["asleep"] == asleep, name
            state[name] = first
            return own(first, *args, **kw)
        monkeypatch.setattr(owner, name, call)

    def load_weights(self, weights, own=TransformersSampler.load_weights):
        if state["asleep"]:  # not when the run starts
            assert all(p.grad is None for p in state["compute_logprobs"].parameters())
        state.update(asleep=False, load_weights=self)
        own(self, weights)
    monkeypatch.setattr(TransformersSampler, "sleep", lambda _: state.update(asleep=True))
    monkeypatch.setattr(TransformersSampler, "load_weights", load_weights)
    for asleep, owner, name in [
            (False, TransformersSampler, "sample"), (True, train, "compute_logprobs"),
            (True, Trainer, "step")]:
        only_while(asleep, owner, name)
    run(base, tmp_path / "run", "--rollout_lag", "1", "--rollouts", "3", "--eval_every", "0",
        "--drop_uniform_groups")
    assert {"sample", "load_weights", "compute_logprobs", "step"} <= {*state}


def fake_cuda(monkeypatch, **functions):
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)


def test_the_state_is_counted_with_its_copies_and_peak_memory_without_a_sleeping_engines(
        small, monkeypatch):
    p = load(small())
    n = sum(x.numel() for x in p.parameters())
    assert loading.state_bytes(p, False) == 16 * n
    p.dtype = "bfloat16"
    assert loading.state_bytes(p, False) == 18 * n  # autocast's copies
    # torch counts 50 GB that vLLM has unmapped; the trainer goes from 10 GB to 25
    gpu = dict(free=70e9, allocated=60e9, peak=0)
    fake_cuda(monkeypatch, is_available=lambda: True, mem_get_info=lambda: (gpu["free"], 80e9),
              memory_allocated=lambda: gpu["allocated"], max_memory_allocated=lambda: gpu["peak"],
              reset_peak_memory_stats=lambda: gpu.update(peak=gpu["allocated"]))
    monkeypatch.setattr(parallel, "UNCOUNTED", 0)
    parallel.watch_memory()
    assert parallel.peak_memory() == 10e9
    gpu["peak"] = 75e9
    assert parallel.peak_memory() == 25e9


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
        logprobs = HeadLogprobs.apply(hidden.to(dtype), w, bias, ids, 1.0, wide)[0]
        logprobs.sum().backward()
        found.append((logprobs - exact.log_softmax(-1)[ids, ids]).abs().max().item())
        gradients.append(w.grad)
    assert found[0] < 2e-5 and found[1] > 20 * found[0]
    assert (gradients[0] - gradients[1]).norm() < 0.02 * gradients[1].norm()
    assert head_logits(hidden, weight, wide=True).equal(hidden @ weight.T)  # of float32


@pytest.mark.parametrize("flags, wanted", [
    ("--dtype bfloat16", "float32"), ("--dtype float32", "model"),
    ("--dtype float16 --head_dtype model", "model")])
def test_the_dtype_of_the_head_goes_by_that_of_the_computation(flags, wanted):
    for args in (train.parse_args(flags.split())[0], evaluation.parse_args(flags.split())):
        assert args.head_dtype == wanted


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_sampler_and_trainer_agree_better_with_a_head_in_float32(kind, base, tmp_path):
    gaps = {}
    for head in ("model", "float32"):
        records = run(base, tmp_path / head, "--rollouts", "1", "--dtype", "bfloat16",
                      "--sampler", kind, "--head_dtype", head, "--eval_every", "0")
        gaps[head] = records[-1]["sampler/logp_absdiff_mean"]
    assert 0 < gaps["float32"] < 0.9 * gaps["model"], gaps  # 0.5 to 0.85, by the CPU


@pytest.mark.parametrize("cuda, named", [
    (None, "is built without CUDA: pip install"), ("13.0", "driver may be too old for CUDA 13.0")])
def test_a_gpu_that_torch_cannot_use_is_a_sentence(cuda, named, monkeypatch, capsys):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert parallel.unusable_gpu() is None  # there is none here
    monkeypatch.setattr(parallel.glob, "glob", lambda pattern: ["/dev/nvidia0"])
    for parse in (train.parse_args, evaluation.parse_args):
        assert named in refused(capsys, parse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert train.parse_args([])[0].dtype == "float32"


@pytest.mark.parametrize("capability, dtype", [((7, 5), "float16"), ((8, 0), "bfloat16")])
def test_what_a_gpu_has_by_default(capability, dtype, monkeypatch):
    args = train.parse_args([])[0], evaluation.parse_args([])
    assert [(x.sampler, x.dtype) for x in args] == [("transformers", "float32")] * 2
    fake_cuda(monkeypatch, is_available=lambda: True, get_device_capability=lambda: capability)
    assert parallel.default_dtype() == dtype
    for installed, kind in ((True, "vllm"), (False, "transformers")):
        monkeypatch.setattr(sampler, "has_vllm", lambda installed=installed: installed)
        assert sampler.default_kind() == kind


def full_gpu(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
                                 "total capacity of 79.15 GiB of which 1.20 GiB is free.")


@pytest.mark.parametrize("owner, name, said", [
    (TransformersSampler, "sample", "sample"), (train, "compute_logprobs", "logp"),
    (Trainer, "step", "update"), (TransformersSampler, "load_weights", "sync"),
    (train, "evaluate", "eval"), (loading, "load", "loading"),
    (TransformersSampler, "__init__", "loading")])
def test_a_full_gpu_is_a_sentence_with_the_phase_and_two_flags(owner, name, said, base, tmp_path,
                                                               monkeypatch):
    full, own, calls = 2 * (name == "load_weights"), getattr(owner, name), count()
    monkeypatch.setattr(owner, name, lambda *given, **more: (  # twice when the run starts
        own if next(calls) < full else full_gpu)(*given, **more))
    words = f"^the GPU's memory is full in the phase {said} .*2.00 GiB.* make roo"
    with pytest.raises(RunFailed, match=words) as failed:
        run(base, tmp_path / "run", "--rollouts", "1", "--eval_every", str(int(name == "evaluate")))
    flags = re.findall(r"--(\w+)", str(failed.value))
    assert len(flags) == 2 and {*flags} <= {*vars(train.parse_args([])[0])}


def test_a_full_gpu_at_a_wake_and_in_an_evaluation(base, tmp_path, monkeypatch, capsys):
    """The error of vLLM's allocator is no torch.OutOfMemoryError; other errors stay as they are."""
    with pytest.raises(RunFailed, match="in the phase sync .*cumem.*--lora_rank 16 or fewer"), \
            room_for("sync"):
        raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")
    with pytest.raises(RuntimeError, match="^other$"), room_for("sync"):
        raise RuntimeError("other")
    monkeypatch.setattr(TransformersSampler, "sample", full_gpu)
    assert "full in the phase sample" in refused(
        capsys, evaluation.main, "--model", base, "--limit", 2, "--out", tmp_path, code=1)


def free_bytes(monkeypatch, free, total):
    fake_cuda(monkeypatch, is_available=lambda: True, mem_get_info=lambda *_: (free, total),
              memory_reserved=lambda: 1e9, empty_cache=lambda: None)


@pytest.mark.parametrize("free, total, share, sequences, small", [
    (80e9, 80e9, 0.9, 1024, False), (40e9, 80e9, 0.48, 1024, False), (12e9, 24e9, 0.48, 256, True)])
def test_an_engine_goes_by_the_memory_that_is_free(free, total, share, sequences, small,
                                                   monkeypatch):
    free_bytes(monkeypatch, free, total)
    assert parallel.usable_memory() == free + 1e9
    found = vllm_settings.of_this_machine(64, gpu_memory_utilization=None)
    assert found["gpu_memory_utilization"] == pytest.approx(share)
    assert found["max_num_seqs"] == sequences and found["sleep_mode_offload_cudagraph"] is small
    graphs = found["compilation_config"]["cudagraph_capture_sizes"]
    assert graphs[-1] == sequences and graphs[:4] == [1, 2, 4, 8] and len(graphs) < 15
    found = vllm_settings.of_this_machine(64, 0.1, 100)
    assert found["compilation_config"]["cudagraph_capture_sizes"][-2:] == [64, 100]


def test_an_engine_that_does_not_fit_is_a_sentence(base, monkeypatch, capsys):
    args = evaluation.parse_args([])
    free_bytes(monkeypatch, 0.3e9, 24e9)
    args.sampler, problem = "vllm", dict(prompt="1", verifier="math", answer="1", id="0")
    assert "0.3 of the GPU's 24.0 GB are free" in refused(
        capsys, lambda _: evaluation.load_model(args, [problem]))
    with pytest.raises(ValueError, match="it is to take 9.6 GB; .*--gpu_memory_utilization"):
        vllm_settings.of_this_machine(64)


@needs_vllm
def test_vllm_takes_the_arguments_of_a_gpu(base, monkeypatch):
    """Those that the CPU's engine does not get; an upgrade that renames one fails here."""
    import vllm
    from vllm.config import CompilationConfig
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    own, given = vllm.LLM, {}
    free_bytes(monkeypatch, 20e9, 24e9)
    monkeypatch.setattr(vllm, "LLM", lambda _, **settings: given.update(settings))
    VLLMSampler(base, dtype="bfloat16", max_length=64, eos=[1], head_dtype="float32", tp=2)
    named = {*inspect.signature(own.__init__).parameters}
    more = {name for name in given if name not in named}  # **kwargs goes to EngineArgs
    assert more <= {f.name for f in dataclasses.fields(vllm.EngineArgs)}, more
    assert {"enable_sleep_mode", "compilation_config"} <= {*given}
    graphs = "sleep_mode_offload_cudagraph"  # since 0.32
    assert (graphs in given) == hasattr(vllm.EngineArgs, graphs)
    graphs = CompilationConfig(**given["compilation_config"])
    assert graphs.cudagraph_capture_sizes[-1] == 256
    assert hasattr(vllm.config.ModelConfig, "head_dtype")  # which hf_overrides sets
    worker = gpu_worker.Worker
    for function, names in {
            own.sleep: ["level"], own.wake_up: ["tags"], own.collective_rpc: ["method", "kwargs"],
            own.reset_prefix_cache: [], worker.sleep: ["level"], worker.wake_up: ["tags"],
            worker.reload_weights: ["kwargs"],
            GPUModelRunner.reload_weights: ["weights_iterator"]}.items():
        takes = {*inspect.signature(function).parameters}
        assert {*names} <= takes or "kwargs" in takes, function


def setting(model, method, init_scale, enabled=True, dtype="float32"):
    """-> a Trainer, in float32 but for the scaler, so that its effect alone shows; and a Batch."""
    p = load(model)
    p.dtype = dtype
    batch = scored(p, rollout(101), torch.Generator().manual_seed(2))
    trainer = Trainer(p, METHODS[method], max_tokens=13, lr=1e-3,
                      factor=partial(lr_factor, 2, "constant", 9))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=enabled)
    return trainer, batch


@pytest.mark.parametrize("method", ["grpo", "acpo", "ar_lopti"])  # acpo: two stages
def test_the_scale_does_not_change_the_update(model, method):
    """A power of two, in float32: the same bits. Nor does a checkpoint before the first step."""
    weights = []
    for enabled in (False, True):
        trainer, batch = setting(model, method, 2.0**10, enabled)
        if enabled:
            trainer.state()
        assert trainer.step(batch)["overflow"] == 0 and trainer.steps_taken == 1
        weights.append(torch.cat([w.detach().flatten() for w in trainer.policy.parameters()]))
    assert torch.equal(*weights)


def test_where_no_scale_can_help_the_run_ends(model):
    trainer, batch = setting(model, "grpo", 1.0)
    batch.advantages = torch.full_like(batch.advantages, 3e38)
    with pytest.raises(NotFinite) as stop:
        for _ in range(3):
            trainer.step(batch)
    assert stop.value.minibatch is batch


def test_small_gradients_survive(model):
    """What the scale is for: without it float16 rounds them to 0."""
    def scaled(scale, dtype):
        trainer, batch = setting(model, "grpo", scale, dtype=dtype)
        batch.advantages = 1e-5 * batch.advantages
        trainer.policy.zero_grad()
        policy.backward(trainer.policy, batch, trainer.method, 13, scale=trainer.scaler.scale)
        return torch.cat([w.grad.flatten() for w in trainer.policy.parameters()]) / scale

    wanted = scaled(1.0, "float32")
    without_scale, with_scale = ((scaled(scale, "float16") - wanted).norm() / wanted.norm()
                                 for scale in (1.0, 2.0**16))
    assert with_scale < 0.02 and without_scale > 5 * with_scale


@pytest.mark.parametrize("sampler", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_a_run_in_float16_and_its_resume(base, tmp_path, sampler):
    """The scale is part of the state: here it grows within the run."""
    flags = ["--model", base, *SMALL, "--loss", "acpo", "--dtype", "float16", "--sampler", sampler,
             "--save_every", "1", "--keep", "9", "--rollouts", "4"]
    train.main([*flags, "--out", str(tmp_path / "whole")])
    records = read_rows(tmp_path / "whole")
    assert [r["optim/overflows"] for r in records[1:]] == [0, 0, 0, 0]
    assert records[1]["sampler/logp_absdiff_mean"] < 2e-3
    state = torch.load(tmp_path / "whole/checkpoints/rollout_000004/trainer.pt")
    assert state["trainer"]["scaler"]["_growth_tracker"] == 8
    if sampler == "transformers":
        out = without(tmp_path / "whole", tmp_path / "run", 3, 4)
        train.main(["--out", str(out), "--resume"])
        assert same(out, tmp_path / "whole")


def test_every_method_has_a_finite_gradient_in_float16_also_without_any_advantage(model):
    for name in METHODS:
        trainer, batch = setting(model, name, 2.0**10, dtype="float16")
        assert trainer.step(batch)["overflow"] == 0, name
    # its gradient is 0 and not None, which the scaler would refuse
    trainer, batch = setting(model, "reinforce", 2.0**10, dtype="float16")
    batch.advantages = torch.zeros_like(batch.advantages)
    assert trainer.step(batch)["overflow"] == 0 and trainer.steps_taken == 1
    taken = trainer.optimizer.state
    assert all(taken[w]["step"] == 1 for w in trainer.policy.parameters())
