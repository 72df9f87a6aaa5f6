"""The policy on a batch: log probabilities, entropy, and the exact gradient of one optimizer step.

`compute` in these functions is dict(temperature, dtype, budget): the sampling temperature (logprobs are taken at it,
as the sampler takes them), "float32" or "bfloat16" computation, and the tokens that go through the model at once.
"""

from dataclasses import dataclass, fields

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from losses import Tokens, call, every_token, policy_loss, step_size


@dataclass
class Batch:
    """Completions, a row each: N of them, T tokens at most."""

    ids: torch.Tensor               # [N, L] prompt, completion, padding on the right
    prompt_len: torch.Tensor        # [N]
    completion_len: torch.Tensor    # [N]
    mask: torch.Tensor              # [N, T] bool: the completion tokens that count
    sampler_logprobs: torch.Tensor  # [N, T], as all that follows
    old_logprobs: torch.Tensor = None
    entropy: torch.Tensor = None
    advantages: torch.Tensor = None
    ref_logprobs: torch.Tensor = None

    def rows(self, index):
        return Batch(*(None if (x := getattr(self, f.name)) is None else x[index] for f in fields(self)))

    def tokens(self, logprobs, entropy):
        """The optimizer step as losses.py takes it, at the policy's present logprobs and entropy."""
        return Tokens(logprobs, self.old_logprobs, self.advantages, self.mask, entropy, self.sampler_logprobs,
                      self.ref_logprobs)


def make_batch(prompts, completions, device="cpu"):
    """prompts: N lists of token ids; completions: N sampler.Completions."""
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    return Batch(ids=pad([torch.tensor(p + c.tokens) for p, c in zip(prompts, completions)]),
                 prompt_len=torch.tensor([len(p) for p in prompts], device=device),
                 completion_len=torch.tensor([len(c.tokens) for c in completions], device=device),
                 mask=pad([torch.ones(len(c.tokens), dtype=torch.bool) for c in completions]),
                 sampler_logprobs=pad([torch.tensor(c.logprobs) for c in completions]))


def forward(model, batch, compute, entropy_grad=False):
    """-> log pi of the completion tokens and the entropy there in nats, each [N, T], 0 in padding.

    The entropy has a gradient where asked for: that costs the memory of another [tokens, vocabulary].

    No attention mask: the padding is on the right, where causal attention never looks."""
    length = batch.prompt_len + batch.completion_len
    ids = batch.ids[:, :length.max()]
    place = torch.arange(ids.shape[1], device=ids.device)
    predicts = (place >= batch.prompt_len[:, None] - 1) & (place < length[:, None] - 1)  # place t predicts token t + 1
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=compute["dtype"] == "bfloat16"):
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[predicts])  # [completion tokens, vocabulary]: none for prompts
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / compute["temperature"]
    log_pi = logits.log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy = -(log_pi.exp() * log_pi).sum(-1)
    logprobs = log_pi.gather(-1, ids.roll(-1, 1)[predicts][:, None])[:, 0]
    completion = torch.arange(batch.mask.shape[1], device=ids.device) < batch.completion_len[:, None]
    return tuple(x.new_zeros(completion.shape).masked_scatter(completion, x) for x in (logprobs, entropy))


def load(folder, eos, batch, compute):
    """-> the model in float32, the master weights, on the GPU where there is one.

    Raises ValueError for a folder that lacks weights, and for a model that does more after its LM head than `forward`
    does (a softcap, a scale): its log probabilities on `batch` would be others."""
    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    except Exception as e:  # what can be wrong with a folder has no end
        raise ValueError(f"cannot be loaded: {(str(e) or type(e).__name__).splitlines()[0]}") from None
    if told["missing_keys"]:
        raise ValueError(f"lacks weights: {', '.join(sorted(told['missing_keys'])[:3])}")
    with torch.no_grad():
        ours = forward(model, batch, dict(compute, dtype="float32"))[0]
        whole = (model(batch.ids).logits / compute["temperature"]).log_softmax(-1)[:, :-1].gather(-1, batch.ids[:, 1:, None])[..., 0]
    gap = (ours - whole[:, -ours.shape[1]:]).abs().max().item()
    if not gap < 1e-3:
        raise ValueError(f"changes its logits after the LM head, or its weights are not finite: policy.forward's log probabilities are off by {gap:.2g}")
    model.generation_config = GenerationConfig(eos_token_id=eos)  # saved with checkpoints; the model's own may not be valid
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def micro_batches(batch, budget):
    """Rows in groups of at most `budget` tokens with the padding (a longer row goes alone), like lengths together."""
    lengths = (batch.prompt_len + batch.completion_len).tolist()
    groups = []
    for row in sorted(range(len(lengths)), key=lambda r: -lengths[r]):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > budget:
            groups.append([])
        groups[-1].append(row)
    return groups


def in_order(parts, outputs):
    """What `forward` gave for each micro-batch -> logprobs, entropy [N, T], rows in the batch's order."""
    order = torch.tensor(sum(parts, [])).argsort()
    return tuple(torch.cat(x)[order] for x in zip(*outputs))


@torch.no_grad()
def score(model, batch, compute):
    """`forward` without gradient, micro-batch by micro-batch."""
    parts = micro_batches(batch, compute["budget"])
    return in_order(parts, [forward(model, batch.rows(part), compute) for part in parts])


def backward(model, batch, method, hp, compute, max_tokens, only=every_token, entropy_coef=0.0, **coefficients):
    """Adds the gradient of one optimizer step on the completions of `batch` to the parameters' .grad, and returns
    what to log of it. only: one of the method's passes; coefficients: tis_cap and kl_coef of losses.policy_loss.

    The gradient is that of the loss of the whole step, however it is cut into micro-batches: the denominators are
    the step's, and a method that looks at the whole step is shown it. For such a method the logprobs are gathered
    without gradient first, the loss is differentiated with respect to them, and that is pushed through the model
    part by part; a step that fits into one micro-batch never pays for this."""
    size = step_size(batch.mask, max_tokens)

    def loss_of(rows, logprobs, entropy, size=size):
        return policy_loss(method, rows.tokens(logprobs, entropy.detach()), max_tokens, size=size, only=only,
                           **coefficients, **hp)

    def bonus(rows, logprobs, entropy):
        counts = call(only, hp, rows.tokens(logprobs.detach(), entropy.detach()))
        return call(method.aggregate, hp, entropy * counts, rows.mask, size)

    parts = micro_batches(batch, compute["budget"])
    gather_first = method.whole_step and len(parts) > 1
    if gather_first:
        logprobs, entropy = score(model, batch, compute)
        pull, = torch.autograd.grad(loss_of(batch, logprobs.requires_grad_(), entropy)[0], logprobs)
    seen = []
    for part in parts:
        rows = batch.rows(part)
        logprobs, entropy = forward(model, rows, compute, entropy_grad=entropy_coef != 0)
        loss = (logprobs * pull[part]).sum() if gather_first else loss_of(rows, logprobs, entropy)[0]
        if entropy_coef:
            loss = loss - entropy_coef * bonus(rows, logprobs, entropy)
        loss.backward()
        seen.append((logprobs.detach(), entropy.detach()))
    logprobs, entropy = in_order(parts, seen)
    _, metrics = loss_of(batch, logprobs, entropy, size=None)  # of the whole step: no average of averages
    if entropy_coef:
        metrics["entropy_loss"] = -entropy_coef * bonus(batch, logprobs, entropy)
        metrics["loss"] = metrics["loss"] + metrics["entropy_loss"]
    return metrics
