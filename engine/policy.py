"""The policy: log probabilities, entropies, and the exact gradient of one optimizer step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine import forward, parallel
from engine.forward import lay, micro_batches
from losses import Tokens, policy_loss, step_metrics, step_size

RUINED = "the model's probabilities are nan: a step has ruined the weights (a lower --lr helps)"


@dataclass
class Completion:
    tokens: list           # ids, with the end-of-sequence token, where there is one
    logprobs: list         # of each token, after temperature; with top_p 1 as it was drawn
    truncated: bool        # stopped by max_tokens and not by an end-of-sequence token or a text
    stopped: bool = False  # by the text of --stop, which the last tokens hold


@dataclass
class Batch:
    """N rows of a prompt and a completion of at most T tokens."""

    ids: Tensor               # [N, L] prompt, completion, padding on the right
    prompt_len: Tensor        # [N]
    completion_len: Tensor    # [N]
    mask: Tensor              # [N, T] bool; False: padding, or left out (--mask_truncated)
    sampler_logprobs: Tensor  # [N, T], as are the next six; of the distribution that was sampled
    old_logprobs: Tensor = None  # log pi_old, of the policy that --old_logprobs names
    entropy: Tensor = None
    advantages: Tensor = None
    ref_logprobs: Tensor = None
    teacher_logprobs: Tensor = None
    weight: Tensor = None     # of the tokens in this pass over the rollout
    group: Tensor = None      # [N] rows of one number have one prompt

    @property
    def lengths(self):
        """[N] tokens of the prompt and the completion."""
        return self.prompt_len + self.completion_len

    def map(self, f):
        return Batch(**{name: x if x is None else f(x) for name, x in vars(self).items()})

    def rows(self, index):
        return self.map(lambda x: x[index])

    def to(self, device):
        return self.map(lambda x: x.to(device))

    def set_advantages(self, advantages):
        """Gives each token its completion's advantage, of [P, G], and a teacher's part."""
        self.advantages = advantages.reshape(-1, 1).expand(self.mask.shape)
        if self.teacher_logprobs is not None:
            self.advantages = self.advantages + self.teacher_logprobs - self.old_logprobs

    def tokens(self, logprobs, entropy):
        """The batch as losses.py takes it, at these log probabilities and entropies [N, T]."""
        return Tokens(logprobs, self.old_logprobs, self.advantages, self.mask, entropy,
                      sampler_logprobs=self.sampler_logprobs, ref_logprobs=self.ref_logprobs,
                      weight=self.weight, group=self.group[:, None].expand_as(self.mask))


def make_batch(groups, device="cpu"):
    """groups: of each prompt its token ids and its Completions -> the Batch, group by group."""
    numbers, prompts, completions = zip(*(
        (number, prompt, c) for number, (prompt, group) in enumerate(groups) for c in group))

    def pad(tensors):
        return torch.nn.utils.rnn.pad_sequence([*tensors], batch_first=True).to(device)
    return Batch(
        ids=pad(torch.tensor(prompt + c.tokens) for prompt, c in zip(prompts, completions)),
        prompt_len=torch.tensor([*map(len, prompts)], device=device),
        completion_len=torch.tensor([len(c.tokens) for c in completions], device=device),
        mask=pad(torch.ones(len(c.tokens), dtype=torch.bool) for c in completions),
        sampler_logprobs=pad(torch.tensor(c.logprobs) for c in completions),
        group=torch.tensor(numbers, device=device))


def shuffled_shares(count, steps, seed, rollout, together=1):
    """-> the rows of each optimizer step. `together` consecutive rows stay in one step."""
    generator = torch.Generator().manual_seed(parallel.seed_of("shuffle", seed, rollout))
    pieces = torch.randperm(count // together, generator=generator)
    return torch.arange(count).view(-1, together)[pieces].flatten().chunk(steps)


def minibatches(batch, method, steps, seed, rollout, together=1):
    """Yields the rows and the weighted Batch of each optimizer step of each pass of the method."""
    shares = shuffled_shares(len(batch.ids), steps, seed, rollout, together)
    scored = batch.tokens(batch.old_logprobs, batch.entropy)  # at ratio 1
    for weigh in method.passes:
        weighted = replace(batch, weight=method.call(weigh, scored))
        for rows in shares:
            minibatch = weighted.rows(rows)
            if minibatch.mask.any():  # --mask_truncated may leave no token: the step is left out
                yield rows, minibatch


class Policy(torch.nn.Module):
    """A causal language model: completions in, log probabilities and entropies out.

    temperature: divides the logits. dtype: of computation; weights in training are in float32.
    head_dtype: of the logits ("float32"), or dtype's ("model"). budget: tokens that go through the
    model at once. layout: try_shared of loading.py chooses. chunk: elements of logits at once."""

    def __init__(self, model, temperature=1.0, dtype="float32", budget=16384, layout="padded",
                 head_dtype="model", chunk=forward.CHUNK):
        super().__init__()
        self.model, self.temperature, self.dtype, self.budget = model, temperature, dtype, budget
        self.head_dtype, self.chunk = head_dtype, chunk
        stock = model.config._attn_implementation  # "shared": by another Policy of the model
        self.stock = "sdpa" if stock == "shared" else stock
        forward.register_attention()
        self.use_layout(layout)

    def use_layout(self, layout):
        """Sets the layout, and the model's attention to match."""
        self.layout = layout
        self.model.set_attn_implementation(self.stock if layout == "padded" else "shared")

    def forward(self, batch):
        """-> log pi of the completion tokens and the entropy there in nats: [N, T], 0 in padding"""
        device, dtype = batch.ids.device, getattr(torch, self.dtype)
        half = self.dtype != "float32"
        # transformers hands blocks or varlen among the inputs on to forward.shared_attention
        inputs, predicts, targets = lay(batch, self.layout, forward.flash_runs(device, dtype))
        head = self.model.get_output_embeddings()
        with torch.autocast(device.type, dtype, half):
            hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        hidden = forward.take(hidden.flatten(0, 1), predicts)
        outputs = forward.HeadLogprobs.apply(
            hidden.to(dtype) if half else hidden, head.weight, head.bias, targets,
            self.temperature, self.head_dtype == "float32", self.chunk)
        places = forward.places_of(batch.completion_len)  # batch.mask may leave out some of them
        return tuple(x.new_zeros(batch.mask.shape).index_put(places, x) for x in outputs)


def rank_micro_batches(policy, batch, among=None):
    """-> this rank's micro-batches, of all rows or those `among`: a list of (rows, Batch)."""
    parts = micro_batches(batch, policy.budget, policy.layout, parallel.world(), among)
    return [(rows, batch.rows(rows or [0]))  # no rows: row 0, a filler
            for rows in parts[parallel.rank()::parallel.world()]]


def gather_rows(batch, parts, outputs):
    """The policy's outputs on every rank's micro-batches -> logprobs, entropy [2, N, T]."""
    whole = outputs[0][0].new_zeros(2, *batch.mask.shape)
    for (rows, _), output in zip(parts, outputs):
        whole[:, rows] = torch.stack(output)[:, :len(rows)]
    return parallel.all_reduce(whole)  # each row is one rank's, and 0 elsewhere


def rows_to_learn(batch, method, entropy_coef=0.0, kl_coef=0.0, **_):
    """The rows of a step that can have a gradient: all, or those with A other than 0 where A = 0
    gives no gradient. If none is left, row 0: its gradient is 0, not None, and AdamW steps."""
    if entropy_coef or kl_coef or not method.skips_zero_advantage:
        return [*range(len(batch.ids))]
    learnt = (batch.mask & (batch.advantages != 0)).any(1)
    return learnt.nonzero().flatten().tolist() or [0]


@torch.no_grad()
def compute_logprobs(policy, batch):
    """The policy's logprobs and entropy [N, T], without gradient."""
    parts = rank_micro_batches(policy, batch)
    return gather_rows(batch, parts, [policy(micro_batch) for _, micro_batch in parts]).unbind()


def backward(policy, batch, method, max_tokens, scale=lambda x: x, **options):
    """Adds the gradient of one optimizer step on `batch` to the parameters' .grad -> its metrics.

    scale: GradScaler.scale, float16 only; options: of losses.policy_loss. The gradient is the same
    for any micro-batches and ranks: every denominator is the step's. Where a @whole_step method has
    several micro-batches, a first pass without a graph gives d loss / d (log pi, entropy) of all
    tokens, and a second takes each micro-batch's rows of it to the weights. Rows without a
    gradient do not go through the model."""
    size = step_size(batch.mask, max_tokens, batch.group[:, None].expand_as(batch.mask))

    def loss_of(part, logprobs, entropy):
        return policy_loss(method, part.tokens(logprobs, entropy), max_tokens, size=size, **options)

    learnt = rows_to_learn(batch, method, **options)
    parts = rank_micro_batches(policy, batch, learnt)
    outputs, d_outputs = [], ()
    if method.whole_step and len(parts) * parallel.world() > 1:
        leaves = [x.requires_grad_() for x in compute_logprobs(policy, batch)]
        d_outputs = torch.autograd.grad(loss_of(batch, *leaves), leaves, allow_unused=True)
    for rows, micro_batch in parts:
        output = policy(micro_batch)
        if not rows:  # FSDP needs a backward pass of every rank
            loss = 0 * output[0].sum()
        elif d_outputs:  # of a loss with these gradients
            loss = sum((x * d[rows]).sum() for x, d in zip(output, d_outputs) if d is not None)
        else:
            loss = loss_of(micro_batch, *output)
        scale(loss).backward()
        outputs.append(tuple(x.detach() for x in output))
    whole = gather_rows(batch, parts, outputs)
    # rows with A = 0, which did not go through the model, count as on-policy, with ratio 1
    if rest := sorted({*range(len(batch.ids))} - {*learnt}):
        whole[:, rest] = torch.stack([batch.old_logprobs, batch.entropy])[:, rest].to(whole)
    metrics = step_metrics(method, batch.tokens(*whole), max_tokens, **options)
    return {**metrics, "learnt_tokens": batch.lengths[learnt].sum()}
