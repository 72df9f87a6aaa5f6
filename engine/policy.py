"""The policy: log probabilities, entropies, and the exact gradient of one optimizer step."""

from dataclasses import dataclass, fields, replace

import torch

from engine import kernels, parallel
from engine.completion import seed_of
from engine.layout import lay, micro_batches
from losses import Tokens, policy_loss, step_metrics, step_size


@dataclass
class Batch:
    """N completions, a row each, of at most T tokens, after their prompts."""

    ids: torch.Tensor               # [N, L] prompt, completion, padding on the right
    prompt_len: torch.Tensor        # [N]
    completion_len: torch.Tensor    # [N]
    mask: torch.Tensor              # [N, T] bool: the completion tokens that count
    sampler_logprobs: torch.Tensor  # [N, T], as are all that follow
    old_logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    advantages: torch.Tensor = None
    ref_logprobs: torch.Tensor = None
    weight: torch.Tensor = None     # of the tokens in this pass over the rollout
    group: torch.Tensor = None      # [N] rows of one number have one prompt

    def map(self, f):
        values = (getattr(self, field.name) for field in fields(self))
        return Batch(*(None if x is None else f(x) for x in values))

    def rows(self, index):
        return self.map(lambda x: x[index])

    def to(self, device):
        return self.map(lambda x: x.to(device))

    def tokens(self, logprobs, entropy):
        """The batch as losses.py takes it, at these log probabilities and entropies [N, T]."""
        return Tokens(logprobs, self.old_logprobs, self.advantages, self.mask, entropy,
                      self.sampler_logprobs, self.ref_logprobs, self.weight)


def make_batch(prompts, completions, device="cpu"):
    """prompts: N lists of token ids; completions: N sampler.Completions."""
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    pairs, number = list(zip(prompts, completions, strict=True)), {}
    return Batch(
        ids=pad([torch.tensor(prompt + c.tokens) for prompt, c in pairs]),
        prompt_len=torch.tensor([len(prompt) for prompt, _ in pairs], device=device),
        completion_len=torch.tensor([len(c.tokens) for _, c in pairs], device=device),
        mask=pad([torch.ones(len(c.tokens), dtype=torch.bool) for _, c in pairs]),
        sampler_logprobs=pad([torch.tensor(c.logprobs) for _, c in pairs]),
        group=torch.tensor([number.setdefault(tuple(p), len(number)) for p, _ in pairs],
                           device=device))


class Policy(torch.nn.Module):
    """A causal language model: completions in, log probabilities and entropies out.

    temperature: divides the logits, as in sampling. dtype: "float32", "bfloat16" or "float16"
    computation over float32 weights. budget: tokens that go through the model at once. layout:
    "padded" or "shared", see engine/layout.py."""

    def __init__(self, model, temperature=1.0, dtype="float32", budget=16384, layout="padded"):
        super().__init__()
        self.model, self.temperature, self.dtype, self.budget = model, temperature, dtype, budget
        stock = model.config._attn_implementation  # or that of another Policy of the model
        self.padded_attention = "sdpa" if stock == "end_to_end" else stock
        self.use_layout(layout)

    def use_layout(self, layout):
        """Sets the layout, and the model's attention to match."""
        if layout != "padded":
            kernels.register_end_to_end()
        self.layout = layout
        self.model.set_attn_implementation(
            self.padded_attention if layout == "padded" else "end_to_end")

    def forward(self, batch):
        """-> log pi of the completion tokens and the entropy there in nats: [N, T], 0 in padding"""
        device, halved = batch.ids.device.type, self.dtype != "float32"
        inputs, predicts, targets = lay(batch, self.layout, device == "cuda" and halved)
        head = self.model.get_output_embeddings()
        with torch.autocast(device, getattr(torch, self.dtype), halved):
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            hidden = kernels.take(hidden.flatten(0, 1), predicts)
            outputs = kernels.HeadLogprobs.apply(hidden, head.weight, head.bias, targets,
                                                 self.temperature)
        column = torch.arange(batch.mask.shape[1], device=batch.ids.device)
        inside = column < batch.completion_len[:, None]
        return tuple(x.new_zeros(inside.shape).masked_scatter(inside, x) for x in outputs)


# ---------------------------------------------------------------------------- cutting a batch

def shuffled_shares(completions, steps, seed, rollout, together=1):
    """The rows of each optimizer step of a rollout: [steps] index tensors, disjoint, shuffled;
    `together` consecutive rows stay in one step."""
    generator = torch.Generator().manual_seed(seed_of("shuffle", seed, rollout))
    pieces = torch.randperm(completions // together, generator=generator)
    return (pieces[:, None] * together + torch.arange(together)).flatten().chunk(steps)


def in_pass(batch, method, weigh):
    """The scored Batch with the weights of its tokens in one pass of Method.passes."""
    return replace(batch, weight=method.call(weigh, batch.tokens(batch.old_logprobs,
                                                                 batch.entropy)))


def minibatches(batch, method, steps, seed, rollout, together=1):
    """Yields the rows and the Batch of each optimizer step: a shuffled share of the rollout each,
    once for every pass of the method, whose weights of the tokens the Batch has."""
    shares = shuffled_shares(len(batch.ids), steps, seed, rollout, together)
    for weigh in method.passes:
        weighted = in_pass(batch, method, weigh)
        for rows in shares:
            minibatch = weighted.rows(rows.to(batch.ids.device))
            if minibatch.mask.any():  # --mask_truncated may leave no token: optim/skipped
                yield rows, minibatch


def rank_micro_batches(policy, batch, among=None):
    """This rank's micro-batches of the batch, or of the rows `among` it: (rows, Batch of them). An
    empty list of rows comes with the first row as a stand-in, whose results are not used."""
    among = range(len(batch.ids)) if among is None else among
    parts = micro_batches(batch.rows([*among]), policy.budget, policy.layout, parallel.world())
    parts = [[among[i] for i in part] for part in parts[parallel.rank()::parallel.world()]]
    return [(rows, batch.rows(rows or [0])) for rows in parts]


def gather_rows(batch, parts, outputs):
    """What the policy gave for each micro-batch of every rank -> logprobs, entropy [2, N, T]."""
    whole = outputs[0][0].new_zeros(2, *batch.mask.shape)
    for (rows, _), output in zip(parts, outputs, strict=True):
        whole[:, rows] = torch.stack(output)[:, :len(rows)]
    return parallel.all_reduce(whole)  # each row is one rank's, and 0 elsewhere


# ---------------------------------------------------------------------------- the whole batch

def rows_to_learn(batch, method, entropy_coef=0.0, kl_coef=0.0, **_):
    """The rows of a step that have a gradient: those with an advantage, if nothing else gives one.
    The first row stands in for none: gradients are then 0, not None, and AdamW goes on."""
    learnt = (batch.mask & (batch.advantages != 0)).any(1)
    if entropy_coef or kl_coef or not method.needs_advantage:
        learnt[:] = True
    learnt[0] |= ~learnt.any()
    return learnt.nonzero()[:, 0].tolist()


@torch.no_grad()
def compute_logprobs(policy, batch):
    """The policy's logprobs and entropy [N, T], without gradient, micro-batch by micro-batch."""
    parts = rank_micro_batches(policy, batch)
    return gather_rows(batch, parts, [policy(micro_batch) for _, micro_batch in parts]).unbind()


def entropy_term(method, batch, entropy, size, entropy_coef):
    """The entropy bonus as a term of the loss, aggregated as the method's tokens are."""
    weighted = entropy if batch.weight is None else entropy * batch.weight
    return -entropy_coef * method.call(method.aggregate, weighted, batch.mask, size)


def backward(policy, batch, method, max_tokens, entropy_coef=0.0, scale=lambda x: x, **options):
    """Adds the gradient of one optimizer step on `batch` to the parameters' .grad, and returns
    what to log of it. entropy_coef: weighs the entropy bonus; scale: GradScaler.scale, float16
    only; options: kl_coef and the correction of losses.policy_loss.

    The gradient is that of the whole step's loss, however the step is cut into micro-batches and
    over ranks, since every denominator is the step's. A @whole_step method that is cut takes the
    chain rule in two stages: d loss / d outputs of all tokens at once, from a pass without
    gradient, then d outputs / d weights of each micro-batch. Rows without a gradient do not go
    through the model; what is logged takes their ratio for 1."""
    size = step_size(batch.mask, max_tokens)

    def loss_of(rows, logprobs, entropy):
        loss = policy_loss(method, rows.tokens(logprobs, entropy.detach()), max_tokens, size=size,
                           **options)
        if entropy_coef:
            loss = loss + entropy_term(method, rows, entropy, size, entropy_coef)
        return loss

    learnt = rows_to_learn(batch, method, entropy_coef, **options)
    parts, d_outputs = rank_micro_batches(policy, batch, learnt), None
    if method.whole_step and len(parts) * parallel.world() > 1:
        leaves = [x.requires_grad_() for x in compute_logprobs(policy, batch)]
        d_outputs = torch.autograd.grad(loss_of(batch, *leaves), leaves, allow_unused=True)
    outputs = []
    for rows, micro_batch in parts:
        output = policy(micro_batch)
        if not rows:  # this rank has no row left; FSDP needs its backward pass
            scale(0 * output[0].sum()).backward()
        elif d_outputs is not None:
            used = [i for i, d in enumerate(d_outputs) if d is not None]
            torch.autograd.backward([output[i] for i in used],
                                    [scale(d_outputs[i][rows]) for i in used])
        else:
            scale(loss_of(micro_batch, *output)).backward()
        outputs.append(tuple(x.detach() for x in output))
    logprobs, entropy = gather_rows(batch, parts, outputs)
    if rest := sorted({*range(len(batch.ids))} - {*learnt}):
        logprobs[rest] = batch.old_logprobs[rest].to(logprobs)
        entropy[rest] = batch.entropy[rest].to(entropy)
    metrics = step_metrics(method, batch.tokens(logprobs, entropy), max_tokens, **options)
    if entropy_coef:
        metrics["entropy_loss"] = entropy_term(method, batch, entropy, size, entropy_coef)
        metrics["loss"] = metrics["loss"] + metrics["entropy_loss"]
    tokens = (batch.prompt_len + batch.completion_len)[learnt]
    return {**metrics, "learnt_tokens": tokens.sum()}
