"""What tests/test_parallel.py runs on one rank and on two: four optimizer steps on a given rollout,
for each method of each of CASES: torchrun --nproc_per_node 2 tests/ranks.py MODEL OUT

overflow: in float16, where one number of the last rank's gradient overflows in the second step.
uniform: no entropy bonus, and two problems whose completions are all right: where an advantage
compares within a group, two of the four steps have no row with an advantage.
In float64, unless said otherwise: AdamW makes a step of the learning rate even of a gradient that
is all rounding (that of the keys' biases is), so that in float32 orders of summation drift apart.
The last step has a single completion that counts, which leaves a rank without any work."""

import sys
from pathlib import Path
from unittest import mock

import torch
from transformers.models.qwen2 import modeling_qwen2

sys.path.insert(0, str(Path(__file__).parent.parent))
import engine.trainer
import train
from engine import loading, parallel, policy
from engine.sampler import Completion
from engine.trainer import Trainer
from losses import METHODS, group_advantages

# uniform: of each kind of method, as rows_to_learn and backward tell them apart
CASES = {"plain": METHODS, "uniform": "grpo rft acpo p3o fade scale_rl ar_lopti".split(),
         **dict.fromkeys(["shared", "checkpointing", "lora", "float32"], ["grpo", "acpo"]),
         "overflow": ["grpo"]}

# transformers' own computes in float32, also in a model in float64
EXACT_NORMS = mock.patch.object(modeling_qwen2, "Qwen2RMSNorm", torch.nn.RMSNorm)


def rollout(vocabulary):
    g = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(5, vocabulary, (n,), generator=g).tolist()

    prompts = [ids(4 + i % 3) for i in range(6)]
    lengths = [1 + (7 * i) % 13 for i in range(24)]
    completions = [Completion(ids(c), [0.0] * c, False) for c in lengths]
    return policy.make_batch([(p, completions[4 * i:4 * i + 4]) for i, p in enumerate(prompts)])


def load(model, option="plain"):
    probe = policy.make_batch([([1], [Completion([5] * n, [0.0], False) for n in (4, 3, 2, 1)])])
    torch.manual_seed(0)
    with EXACT_NORMS:
        p = loading.load(
            model, [1], probe, loading.Compute(
                budget=60, dtype="float16" if option == "overflow" else "float32",
                share_prompts=False,  # whose check would run FSDP before .double()
                activation_checkpointing=option == "checkpointing",
                lora_rank=4 * (option == "lora")))
    p.use_layout("shared" if option == "shared" else "padded")
    return p


def run(model, name, option="plain"):
    """-> told, the metrics of the four steps; and the weights after them."""
    args, method = train.parse_args([
        "--loss", name, "--model", model, "--lr", "1e-5" if option == "float32" else "1e-3",
        "--max_tokens", "13", "--warmup", "2", "--problems_per_rollout", "4", "--group_size", "6",
        "--steps_per_rollout", "4", "--entropy_coef", "0" if option == "uniform" else "0.01",
        *["--teacher", model] * (name == "opd")])
    p = load(model, option)
    if option not in ("float32", "overflow"):
        p.double()
    batch = rollout(101)
    logprobs, batch.entropy = policy.compute_logprobs(p, batch)
    g = torch.Generator().manual_seed(2)
    batch.old_logprobs = logprobs - 0.3 * torch.randn(logprobs.shape, generator=g)
    batch.sampler_logprobs = batch.old_logprobs
    rewards = (torch.rand(4, 6, generator=g) < 0.5).float()
    if option == "uniform":
        rewards[1:3] = 1
    advantages = group_advantages(method, rewards, dict(entropy=1.0))
    batch.advantages = advantages.view(-1, 1).expand(batch.mask.shape)
    batch.mask[18:23] = False
    told, trainer = [], Trainer(
        p, method, lr=args.lr, factor=lambda step: min(1, (step + 1) / 3),
        max_tokens=args.max_tokens, max_grad_norm=args.max_grad_norm,
        entropy_coef=args.entropy_coef)
    trainer.scaler = torch.amp.GradScaler("cpu", 2.0**10, enabled=option == "overflow")
    own = policy.backward
    backward = overflowing(own) if option == "overflow" else own
    with mock.patch.object(policy, "shuffled_shares", lambda *_: torch.arange(24).chunk(4)), \
            mock.patch.object(engine.trainer, "backward", backward):
        for _, minibatch in policy.minibatches(batch, method, 4, seed=0, rollout=0):
            metrics = trainer.step(minibatch)
            told.append({k: float(v) for k, v in metrics.items()})
            told[-1].update(scale=trainer.scaler.get_scale(), steps=trainer.steps_taken)
    return dict(told=told, weights={k: v.clone() for k, v in parallel.weights(p)})


def overflowing(backward):
    """backward, whose second call leaves an infinite number in the last rank's gradient."""
    calls = []

    def wrapped(policy, *args, **kw):
        metrics = backward(policy, *args, **kw)
        calls.append(1)
        if len(calls) == 2 and parallel.rank() == parallel.world() - 1:
            grad = policy.model.get_output_embeddings().weight.grad
            getattr(grad, "_local_tensor", grad)[-1, 0] = float("inf")
        return metrics
    return wrapped


def bytes_of_a_token(model):
    """What autograd keeps, as loading.token_budget measures it."""
    p, batch = load(model), rollout(101)
    one, four = (loading.kept_bytes(p, batch.rows([0] * rows)) for rows in (1, 4))
    return (four - one) / (3 * batch.lengths[0].item())


def main(model, out):
    parallel.start()
    results = {option: {name: run(model, name, option) for name in names}
               for option, names in CASES.items()}
    results.update(bytes=bytes_of_a_token(model))
    if parallel.rank() == 0:
        torch.save(results, out)
    parallel.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
