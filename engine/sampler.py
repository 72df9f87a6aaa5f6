"""The samplers. When vLLM changes (0.32 is tested), this file and vllm_settings.py do.

vLLM runs in the trainer's process. On a CPU transformers answers the same calls (hf_sampler.py).
Sampling keeps no state: what comes out is a function of weights, prompts, settings and `seed`.
"""

import importlib.util
import math
import os
import warnings
from functools import partial

import numpy as np
import torch

from engine import parallel, vllm_settings
from engine.policy import RUINED, Completion


def has_vllm():
    return importlib.util.find_spec("vllm") is not None


def default_kind():
    """vLLM on a GPU. On a CPU transformers samples a small model faster, and starts at once."""
    return "vllm" if torch.cuda.is_available() and has_vllm() else "transformers"


def make_sampler(kind, model, **settings):
    """kind: "vllm" or "transformers"; model: a Hugging Face folder or id; settings: see the class.

    A sampler has four calls: sample, load_weights, sleep, and close at the end. `merged`:
    does load_weights take adapters merged into the weights? 16 or 8 bits round small ones away."""
    if kind == "vllm":
        return VLLMSampler(model, **settings)
    from engine.hf_sampler import TransformersSampler
    return TransformersSampler(model, **settings)


class VLLMSampler:
    """A vLLM engine in this process.

    dtype, head_dtype: as for Policy; the weights are in dtype, too. max_length: of prompt and
    completion together, in tokens. eos: ids that end a completion. stop: a text that ends one, and
    stays in it. adapters: rank and alpha of the policy's; in 16 bits they stay beside the weights.
    resources: of vllm_settings. float8 has no effect. The ranks of tp make one together."""

    def __init__(self, model, *, dtype, max_length, eos, head_dtype="model", stop=None,
                 adapters=None, float8=False, **resources):
        settings = vllm_settings.of_this_machine(max_length, **resources)
        import vllm

        from engine.loading import pretrained, text_config  # imports more than flags need
        config, has_parts = text_config(model)
        self.model, overrides = vllm_settings.empty_model(config), dict(head_dtype=head_dtype)
        if has_parts:
            overrides["architectures"] = [type(self.model).__name__]
        self.vllm, self.eos, self.stop, self.adapters = vllm, eos, stop or None, adapters
        self.merged, self.request = not adapters or dtype == "float32", None
        if not self.merged:
            room = max(8, 2**(adapters[0] - 1).bit_length())  # vLLM has powers of two from 8 to 512
            settings.update(enable_lora=True, max_lora_rank=room)
        self.sleeps, self.asleep = torch.cuda.is_available(), False
        threads = torch.get_num_threads()
        warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")  # of torch
        self.engine = vllm.LLM(
            model, skip_tokenizer_init=not stop, dtype=dtype, max_model_len=max_length, seed=0,
            generation_config="vllm",  # not the model's own top_p and temperature
            logprobs_mode="processed_logprobs",  # after temperature, as drawn
            hf_overrides=partial(vllm_settings.of_text_model, overrides),
            load_format="dummy" if has_parts else "auto", use_tqdm_on_load=False, **settings,
            distributed_executor_backend="external_launcher" if "RANK" in os.environ else None)
        if self.sleeps:
            torch.set_num_threads(threads)  # vLLM sets one, for the whole process
        if has_parts:  # vLLM would look for their weights under other names
            self.load_weights(pretrained(model, dtype).state_dict().items())

    def sample(self, prompts, n, *, seed, temperature, max_tokens, top_p=1.0):
        """n completions of each prompt (lists of token ids) -> a list of n Completions for each."""
        params = self.vllm.SamplingParams(
            n=n, temperature=temperature, top_p=top_p, max_tokens=max_tokens, stop=self.stop,
            # logprobs 0: the drawn token's alone; flat: a list of floats
            stop_token_ids=self.eos, logprobs=0, flat_logprobs=True, skip_special_tokens=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        numpy_state = np.random.get_state()
        # the engine draws from torch's generator, or from numpy's
        with torch.random.fork_rng([parallel.device()] if self.sleeps else []):
            torch.manual_seed(seed)
            np.random.seed(seed % 2**32)
            requests = self.engine.generate(inputs, params, use_tqdm=False,
                                            lora_request=self.request)
        np.random.set_state(numpy_state)
        groups = [[Completion(list(o.token_ids), o.logprobs.logprobs, o.finish_reason == "length",
                              isinstance(o.stop_reason, str))
                   for o in sorted(request.outputs, key=lambda o: o.index)] for request in requests]
        if any(math.isnan(x) for group in groups for c in group for x in c.logprobs):
            raise FloatingPointError(RUINED)  # the engine itself draws on, without a word
        return groups

    def load_weights(self, weights):
        """Takes over the trainer's weights: (name, tensor) pairs, by the names of
        state_dict(): named_parameters() leaves out a tied LM head, which would stay stale.

        It wakes the engine, first for the weights alone: while the trainer gathers its own, one by
        one, they may have the KV cache's room."""
        adapters = {}
        if self.asleep:
            torch.cuda.empty_cache()  # what torch keeps of the update, vLLM cannot take
            self.engine.wake_up(tags=["weights"])
        self.engine.collective_rpc("reload_weights", kwargs=dict(
            weights_iterator=vllm_settings.as_saved(self.model, weights, adapters)))
        if adapters:  # `sample` reads them from a folder
            self.request, self.folder = vllm_settings.request_of(adapters, *self.adapters)
        if self.asleep:
            self.engine.wake_up(tags=["kv_cache"])
            self.asleep = False
        if not self.engine.reset_prefix_cache():  # its keys and values came from the old weights
            raise RuntimeError("vLLM still holds keys and values of the old weights")

    def sleep(self):
        """Gives the GPU's memory to the trainer, until load_weights. The weights are dropped
        (level 2), not copied to the CPU: new ones come anyway."""
        if self.sleeps and not self.asleep:
            self.engine.sleep(level=2)
            self.asleep = True
            parallel.watch_memory()

    def close(self):
        """To be called before parallel.stop(). Under torchrun the worker alone ends: its core would
        end the trainer's process groups, while other ranks still use them, or when Python exits."""
        core = self.engine.llm_engine.engine_core
        if parallel.sharded():
            core._finalizer.detach()
            core = core.engine_core.model_executor
        core.shutdown()
