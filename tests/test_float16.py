"""--dtype float16: the gradient is scaled, a step that overflows is not taken, runs resume."""

import pytest
import torch

import train
from engine import policy
from engine.trainer import NotFinite, Trainer, lr_factor
from helpers import SMALL, needs_vllm, read_rows, same, without
from losses import METHODS
from ranks import load, rollout


def setting(small, method, init_scale, enabled=True, dtype="float32"):
    """-> a Trainer, in float32 but for the scaler, so that its effect alone shows; and a Batch."""
    p = load(small())
    p.dtype = dtype
    batch, g = rollout(101), torch.Generator().manual_seed(2)
    logprobs, batch.entropy = policy.compute_logprobs(p, batch)
    batch.old_logprobs = logprobs - 0.3 * torch.randn(logprobs.shape, generator=g)
    batch.advantages = torch.randn(24, 1, generator=g).expand(batch.mask.shape)
    trainer = Trainer(p, METHODS[method], max_tokens=13, lr=1e-3,
                      factor=lr_factor(2, "constant", 9))
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=enabled)
    return trainer, batch


def gradient(trainer, batch):
    trainer.policy.zero_grad()
    policy.backward(trainer.policy, batch, trainer.method, 13, scale=trainer.scaler.scale)
    return torch.cat([w.grad.flatten() for w in trainer.policy.parameters()])


@pytest.mark.parametrize("method", ["grpo", "acpo", "ar_lopti"])  # acpo: two stages
def test_the_scale_does_not_change_the_update(small, method):
    """A power of two, in float32: the same bits."""
    weights = []
    for enabled in (False, True):
        trainer, batch = setting(small, method, 2.0**10, enabled)
        assert trainer.step(batch)["overflow"] == 0 and trainer.schedule.last_epoch == 1
        weights.append(torch.cat([w.detach().flatten() for w in trainer.policy.parameters()]))
    assert torch.equal(*weights)


def test_where_no_scale_can_help_the_run_ends(small):
    trainer, batch = setting(small, "grpo", 1.0)
    batch.advantages = torch.full_like(batch.advantages, 3e38)
    with pytest.raises(NotFinite) as stop:
        for _ in range(3):
            trainer.step(batch)
    assert stop.value.minibatch is batch


def test_small_gradients_survive(small):
    """What the scale is for: without it float16 rounds them to 0."""
    def scaled(scale, dtype):
        trainer, batch = setting(small, "grpo", scale, dtype=dtype)
        batch.advantages = 1e-5 * batch.advantages
        return gradient(trainer, batch) / scale

    wanted = scaled(1.0, "float32")
    without_scale, with_scale = ((scaled(scale, "float16") - wanted).norm() / wanted.norm()
                                 for scale in (1.0, 2.0**16))
    assert with_scale < 0.02 and without_scale > 5 * with_scale


def test_a_step_without_any_advantage_is_taken(small):
    """Its gradient is 0 and not None, which the scaler would refuse."""
    trainer, batch = setting(small, "reinforce", 2.0**10, dtype="float16")
    batch.advantages = torch.zeros_like(batch.advantages)
    assert trainer.step(batch)["overflow"] == 0 and trainer.schedule.last_epoch == 1
    taken = trainer.optimizer.state
    assert all(taken[w]["step"] == 1 for w in trainer.policy.parameters())


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


def test_every_method_has_a_finite_gradient_in_float16(small):
    for name in METHODS:
        trainer, batch = setting(small, name, 2.0**10, dtype="float16")
        batch.sampler_logprobs = batch.old_logprobs
        assert trainer.step(batch)["overflow"] == 0, name
