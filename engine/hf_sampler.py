"""Sampling with transformers, behind the calls of sampler.VLLMSampler.

A prompt is computed once: its keys and values are repeated for its completions. Completions that
have ended leave the batch, a tenth of it at a time."""

import inspect
from functools import partial

import torch
import torch.nn.functional as F
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, GenerationMixin

from engine import parallel
from engine.forward import head_logits
from engine.loading import add_adapters, pretrained
from engine.policy import RUINED, Completion


def draw(logits, temperature, top_p, generator=None):
    """logits [N, V] -> the next token of each row and its logprob after temperature, before top_p,
    [N, 1] each. Temperature 0 takes the most probable token. generator: torch's, or None.

    On a CPU a few rows at once: their numbers stay in the cache from one pass to the next."""
    if not logits.is_cuda and len(logits) > (few := max(1, 2**18 // logits.shape[1])):
        drawn = [draw(rows, temperature, top_p, generator) for rows in logits.split(few)]
        return tuple(map(torch.cat, zip(*drawn)))
    scaled = logits.float() / (temperature or 1.0)
    if scaled.shape[1] < 2**15:
        logs = scaled.log_softmax(-1)
    else:  # of 262,144 tokens torch's log_softmax is off by 1e-5
        below_most = scaled - scaled.amax(-1, keepdim=True)
        logs = below_most - below_most.logsumexp(-1, keepdim=True)
    if logs[:, 0].isnan().any():  # one NaN makes its whole row NaN
        raise FloatingPointError(RUINED)
    p = (transformers.TopPLogitsWarper(top_p)(None, logs) if top_p < 1 else logs).exp()
    if temperature == 0:
        tokens = logs.argmax(-1, keepdim=True)
    elif p.is_cuda:  # --deterministic refuses cumsum on a GPU
        tokens = torch.multinomial(p, 1, generator=generator)
    else:  # one random number per row; multinomial draws V of them, in fifteen times the time
        below = p.cumsum(-1, dtype=torch.float64)
        uniform = torch.rand(len(p), 1, dtype=torch.float64, generator=generator)
        tokens = torch.searchsorted(below, below[:, -1:] * uniform, right=True)
    return tokens, logs.gather(1, tokens)


def to_float8(x):
    """[..., n] -> the nearest numbers of e4m3, in x's dtype, and their scale [..., 1] in float32,
    with which the largest of n is e4m3's own, 448. (Both by 256, for sums in float16.)"""
    scale = x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12) / 448
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) / 256, scale * 256


def float8_linear(layer, x):
    """A linear layer, W8A8: inputs are rounded token by token, as weights were by output."""
    x8, scale = to_float8(x)
    y = (F.linear(x8, layer.weight).float() * scale * layer.scale).to(x.dtype)
    return y if layer.bias is None else y + layer.bias


class TransformersSampler:
    """A copy of the model, sampled step by step, `chunk` sequences at once, at most 512 and as many
    as have 256 MB of logits. float8: all linear layers but the head compute with weights and inputs
    rounded to e4m3. Other settings: of VLLMSampler. Raises ValueError for a model that it lacks."""

    def __init__(self, model, *, dtype, eos, head_dtype="model", stop=None,
                 float8=False, adapters=None, **_):
        self.device = parallel.device()
        self.model = pretrained(model, dtype).to(self.device)
        own = type(self.model)
        takes = {*inspect.signature(own.forward).parameters}
        self.cache = "cache" if "cache" in takes else "past_key_values"  # since 5.24
        if (own.prepare_inputs_for_generation != GenerationMixin.prepare_inputs_for_generation
                or own._is_stateful or not own._supports_default_dynamic_cache()
                or not {"position_ids", self.cache, "logits_to_keep"} <= takes):
            raise ValueError(f"is a {own.__name__}, which decodes from more than ids, mask, "
                             "positions and a key-value cache: take --sampler vllm")
        head = self.model.get_output_embeddings()
        if head_dtype == "float32":
            head.forward = lambda x: head_logits(
                x.flatten(0, 1), head.weight, head.bias, True).unflatten(0, x.shape[:2])
        self.float8 = [layer for layer in self.model.modules()
                       if float8 and isinstance(layer, torch.nn.Linear) and layer is not head]
        self.merged = not adapters or dtype == "float32" and not float8
        if not self.merged:
            add_adapters(self.model, *adapters)
        for layer in self.float8:
            layer.forward = partial(float8_linear, layer)
        self.load_weights([])  # rounds those that are there
        self.eos, self.stop = eos, stop
        self.chunk = max(1, min(512, 2**26 // len(head.weight)))
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(
            model, trust_remote_code=False) if stop else None

    @torch.no_grad()
    def sample(self, prompts, n, *, seed, temperature, max_tokens, top_p=1.0):
        """n completions of each prompt (lists of token ids) -> a list of n Completions for each."""
        each = sorted([*range(len(prompts))] * n, key=lambda i: (len(prompts[i]), i))
        groups = [[] for _ in prompts]
        settings = temperature, top_p, torch.Generator(self.device).manual_seed(seed)
        for start in range(0, len(each), self.chunk):  # like lengths go together
            chunk = each[start:start + self.chunk]
            numbers, rows = torch.tensor(chunk).unique_consecutive(return_inverse=True)
            completions = self.generate([prompts[i] for i in numbers], rows, max_tokens, settings)
            for i, completion in zip(chunk, completions):
                groups[i].append(completion)
        return groups

    def generate(self, prompts, rows, max_tokens, settings):
        """rows [N]: the prompt of each completion; settings: of `draw` -> N Completions."""
        ids = pad_sequence([*map(torch.tensor, prompts)], True, -1, "left").to(self.device)
        real = (ids >= 0).long()
        ids[ids < 0] = self.eos[0]
        rows, cache = rows.to(self.device), DynamicCache(config=self.model.config)
        at = completions = [Completion([], [], truncated=True) for _ in rows]  # at: in the batch
        for t in range(max_tokens):
            position = (real.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]  # of ids
            logits = self.model(input_ids=ids, attention_mask=real, position_ids=position,
                                use_cache=True, logits_to_keep=1, **{self.cache: cache}).logits
            if t == 0:  # from prompts to completions
                cache.reorder_cache(rows)
                logits, real = logits[rows], real[rows]
            ids, logprobs = draw(logits[:, -1], *settings)  # temperature, top_p, generator
            for c, token, logprob in zip(at, ids[:, 0].tolist(), logprobs[:, 0].tolist()):
                if c.truncated:  # so far
                    c.tokens.append(token)
                    c.logprobs.append(logprob)
                    c.truncated = token not in self.eos
                    if self.stop and c.truncated:
                        # of at most as many tokens as bytes; one before keeps the first's space
                        last = c.tokens[-len(self.stop.encode()) - 1:]
                        c.stopped = self.stop in self.tokenizer.decode(last)
                        c.truncated = not c.stopped
            going = [i for i, c in enumerate(at) if c.truncated]
            if not going:
                break
            if len(going) < 0.9 * len(at):  # copying the cache for fewer costs more than it saves
                at, going = [at[i] for i in going], torch.tensor(going, device=self.device)
                cache.reorder_cache(going)
                ids, real = ids[going], real[going]
            real = F.pad(real, (0, 1), value=1)
        return completions

    @torch.no_grad()
    def load_weights(self, weights):
        parameters = self.model.state_dict()
        for name, weight in weights:
            parameters[name].copy_(weight)
        for layer in self.float8:
            rounded, scale = to_float8(layer.weight)
            layer.weight.copy_(rounded)
            layer.scale = scale[:, 0]

    def sleep(self):
        """Frees nothing: the weights are all that it holds."""

    close = sleep
