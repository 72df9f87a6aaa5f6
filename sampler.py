"""The samplers: the only file that imports vLLM, and the only one to change when vLLM does.

vLLM runs in the trainer's process and gets the weights handed over after each rollout. Where it cannot be
imported, the same calls are served by transformers' generate (slower on a GPU, much the same on a small CPU).
Sampling keeps no state: what comes out is a function of weights, prompts, settings and `seed`.
"""

import hashlib
import importlib.util
import math
import os
import warnings
from dataclasses import dataclass

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

TESTED_VLLM = "0.32"  # collective_rpc("reload_weights", ...) and logprobs_mode are not promised elsewhere
RUINED = "the model's probabilities are not numbers any more: an optimizer step has ruined the weights (a lower --lr helps)"


@dataclass
class Completion:
    tokens: list[int]      # with the end-of-sequence token, where there is one
    logprobs: list[float]  # of each token, as the sampler drew it: after temperature
    truncated: bool        # stopped by max_tokens and not by an end-of-sequence token


def seed_of(*parts):
    """A seed from (seed, rollout, ...): the same in every process, unrelated to its neighbours."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:7])


def eos_ids(model, tokenizer):
    """Every token that ends a completion: chat models often have several (<|im_end|> and <|endoftext|>)."""
    found = [tokenizer.eos_token_id, getattr(AutoConfig.from_pretrained(model).get_text_config(), "eos_token_id", None)]
    try:
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    except OSError:
        pass  # a folder without generation_config.json
    flat = {i for ids in found for i in (ids if isinstance(ids, list) else [ids]) if i is not None}
    return sorted(flat)


def default_kind():
    return "vllm" if importlib.util.find_spec("vllm") else "transformers"


def make_sampler(kind, model, **settings):
    """kind "vllm" or "transformers"; model a Hugging Face folder or id; for the settings see the classes."""
    return {"vllm": VLLMSampler, "transformers": TransformersSampler}[kind](model, **settings)


class VLLMSampler:
    """A vLLM engine in this process.

    dtype: "float32" or "bfloat16", of weights and computation. max_length: of prompt and completion together, in
    tokens. eos: ids that end a completion. memory: share of the GPU's memory that the engine may take. tp: ranks that
    it is spread over. Under torchrun each rank makes one, all at the same time."""

    def __init__(self, model, *, dtype, max_length, eos, memory=0.4, tp=1):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # in this process: weights are handed over
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        cpu = {}
        if not torch.cuda.is_available():
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # or the trainer gets one thread too
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
            # 256 sequences at once leave a small model idle; compiling takes longer than it saves in a short run
            cpu = dict(max_num_seqs=1024, max_num_batched_tokens=max(16384, max_length), enforce_eager=True)
        import vllm
        if not vllm.__version__.startswith(TESTED_VLLM):
            print(f"vllm {vllm.__version__} is installed; the weight sync was tested with {TESTED_VLLM}.* only")
        self.vllm, self.eos, self.sleeps = vllm, eos, torch.cuda.is_available()
        # asleep, the weights go to the CPU's memory (level 1) where there is plenty, else nowhere (2): new ones come anyway
        self.level = 1 if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 4 * (
            torch.cuda.mem_get_info()[1] * memory if self.sleeps else 0) else 2
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its own, of torch
            self.engine = vllm.LLM(
                model, skip_tokenizer_init=True, dtype=dtype, max_model_len=max_length, seed=0,
                generation_config="vllm",  # not the model's own top_p and temperature
                logprobs_mode="processed_logprobs", gpu_memory_utilization=memory, enable_sleep_mode=self.sleeps,
                disable_log_stats=True, use_tqdm_on_load=False, tensor_parallel_size=tp,
                distributed_executor_backend="external_launcher" if "RANK" in os.environ else None, **cpu)

    def sample(self, prompts, n, *, seed, temperature, max_tokens, top_p=1.0):
        """n completions of each prompt (lists of token ids) -> a list of n Completions for each."""
        params = self.vllm.SamplingParams(
            n=n, temperature=temperature, top_p=top_p, top_k=-1, max_tokens=max_tokens, stop_token_ids=self.eos,
            logprobs=0, flat_logprobs=True, detokenize=False, skip_special_tokens=False)
        numpy_state = np.random.get_state()
        with torch.random.fork_rng():  # the engine draws from torch's global generator, on some machines from numpy's
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            outputs = self.engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        np.random.set_state(numpy_state)
        if any(math.isnan(x) for output in outputs for o in output.outputs for x in o.logprobs.logprobs):
            raise FloatingPointError(RUINED)  # the engine itself draws on, without a word
        return [[Completion(list(o.token_ids), o.logprobs.logprobs, o.finish_reason == "length")
                 for o in sorted(output.outputs, key=lambda o: o.index)] for output in outputs]

    def load_weights(self, weights):
        """Takes over the trainer's weights, (name, tensor) pairs in the names of the model's checkpoint.

        Those of state_dict() and not of named_parameters(), which leaves out a tied LM head: it would stay stale."""
        self.engine.collective_rpc("reload_weights", kwargs=dict(weights_iterator=iter(weights)))
        self.engine.reset_prefix_cache()  # its keys and values came from the old weights

    def sleep(self):
        """Gives the GPU's memory to the trainer."""
        if self.sleeps:
            self.engine.sleep(level=self.level)

    def wake(self):
        if self.sleeps:
            self.engine.wake_up()

    def close(self):
        """Before the process group goes, or vLLM complains at exit."""
        self.engine.llm_engine.engine_core.shutdown()


class Recorder(transformers.LogitsProcessor):
    """Applies the temperature and notes the logprob of each token drawn, holding one step's scores at a time."""

    def __init__(self, temperature):
        self.temperature, self.scores, self.logprobs = temperature, None, []

    def __call__(self, input_ids, scores):
        if scores.isnan().any():
            raise FloatingPointError(RUINED)
        self.note(input_ids)
        self.scores = (scores.float() / self.temperature).log_softmax(-1)
        return self.scores

    def note(self, input_ids):
        """The last column of input_ids was drawn from the scores of the call before."""
        if self.scores is not None:
            self.logprobs.append(self.scores.gather(1, input_ids[:, -1:]))


class TransformersSampler:
    """transformers' generate on a copy of the model, behind the same calls. chunk: sequences generated at once."""

    def __init__(self, model, *, dtype, max_length, eos, memory=None, tp=1, chunk=512):
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(self.device).eval()
        self.model.generation_config = GenerationConfig()  # not the model's own top_p and temperature
        self.eos, self.chunk = eos, chunk

    @torch.no_grad()
    def sample(self, prompts, n, *, seed, temperature, max_tokens, top_p=1.0):
        jobs = sorted((len(p), i) for i, p in enumerate(prompts) for _ in range(n))  # like lengths together
        out = [[] for _ in prompts]
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for start in range(0, len(jobs), self.chunk):
                chunk = [i for _, i in jobs[start:start + self.chunk]]
                for i, completion in zip(chunk, self.generate([prompts[i] for i in chunk], temperature, max_tokens, top_p)):
                    out[i].append(completion)
        return out

    def generate(self, prompts, temperature, max_tokens, top_p):
        width, pad = max(map(len, prompts)), self.eos[0]
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=self.device)
        real = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.device)
        recorder = Recorder(temperature or 1.0)
        whole = self.model.generate(
            ids, attention_mask=real, do_sample=temperature > 0, temperature=1.0, top_k=0, top_p=top_p,
            max_new_tokens=max_tokens, eos_token_id=self.eos, pad_token_id=pad,
            logits_processor=transformers.LogitsProcessorList([recorder]))
        recorder.note(whole)
        logprobs = torch.cat(recorder.logprobs, 1).tolist()
        # generate tells no finish reason: it stops a row at the first of these ids, and pads what follows
        ends = torch.isin(whole[:, width:], torch.tensor(self.eos, device=self.device))
        length = torch.where(ends.any(1), ends.int().argmax(1) + 1, ends.shape[1]).tolist()
        return [Completion(row[:k], lp[:k], not ended) for row, lp, k, ended
                in zip(whole[:, width:].tolist(), logprobs, length, ends.any(1).tolist())]

    @torch.no_grad()
    def load_weights(self, weights):
        own = self.model.state_dict()
        for name, weight in weights:
            own[name].copy_(weight)

    def sleep(self):
        pass  # its memory is the model's and nothing else

    def wake(self):
        pass

    def close(self):
        pass
