"""transformers' generate behind the calls of sampler.VLLMSampler: slower on a GPU, much the same on
a small CPU, and there wherever transformers is.
"""

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig

from engine.sampler import RUINED, Completion


class Recorder(transformers.LogitsProcessor):
    """Applies the temperature and keeps the logprob of each token drawn, but only one step's
    scores at a time."""

    def __init__(self, temperature):
        self.temperature, self.scores, self.logprobs = temperature, None, []

    def __call__(self, input_ids, scores):
        if scores.isnan().any():
            raise FloatingPointError(RUINED)
        self.keep_last(input_ids)
        self.scores = (scores.float() / self.temperature).log_softmax(-1)
        return self.scores

    def keep_last(self, input_ids):
        """The last column of input_ids was drawn from the scores of the call before."""
        if self.scores is not None:
            self.logprobs.append(self.scores.gather(1, input_ids[:, -1:]))


class TransformersSampler:
    """transformers' generate on a copy of the model. chunk: sequences generated at once."""

    def __init__(self, model, *, dtype, max_length, eos, memory=None, tp=1, max_num_seqs=None,
                 chunk=512):
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        loaded, info = AutoModelForCausalLM.from_pretrained(model, dtype=dtype,
                                                            output_loading_info=True)
        if info["missing_keys"]:
            raise ValueError(f"it lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
        self.model = loaded.to(self.device).eval()
        self.model.generation_config = GenerationConfig()  # not the model's own top_p, temperature
        self.eos, self.chunk = eos, chunk

    @torch.no_grad()
    def sample(self, prompts, n, *, seed, temperature, max_tokens, top_p=1.0):
        """n completions of each prompt (lists of token ids) -> a list of n Completions for each."""
        lengths = sorted((len(p), i) for i, p in enumerate(prompts) for _ in range(n))
        groups = [[] for _ in prompts]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for start in range(0, len(lengths), self.chunk):  # like lengths go together
                chunk = [i for _, i in lengths[start:start + self.chunk]]
                completions = self.generate([prompts[i] for i in chunk], temperature, max_tokens,
                                            top_p)
                for i, completion in zip(chunk, completions, strict=True):
                    groups[i].append(completion)
        return groups

    def generate(self, prompts, temperature, max_tokens, top_p):
        width, pad = max(map(len, prompts)), self.eos[0]
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts],
                            device=self.device)
        recorder = Recorder(temperature or 1.0)
        whole = self.model.generate(
            ids, attention_mask=real, do_sample=temperature > 0, temperature=1.0, top_k=0,
            top_p=top_p, max_new_tokens=max_tokens, eos_token_id=self.eos, pad_token_id=pad,
            logits_processor=transformers.LogitsProcessorList([recorder]))
        recorder.keep_last(whole)
        logprobs = torch.cat(recorder.logprobs, 1).tolist()
        # generate gives no finish reason: it stops a row at the first of these ids and pads it
        ends = torch.isin(whole[:, width:], torch.tensor(self.eos, device=self.device))
        ended = ends.any(1)
        length = torch.where(ended, ends.int().argmax(1) + 1, ends.shape[1]).tolist()
        rows = zip(whole[:, width:].tolist(), logprobs, length, ended.tolist(), strict=True)
        return [Completion(tokens[:k], lp[:k], truncated=not end) for tokens, lp, k, end in rows]

    @torch.no_grad()
    def load_weights(self, weights):
        parameters = self.model.state_dict()
        for name, weight in weights:
            parameters[name].copy_(weight)

    def sleep(self):
        pass  # its memory is the model's and nothing else

    def wake(self):
        pass

    def close(self):
        pass
