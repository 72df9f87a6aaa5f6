"""A model's configuration, without its weights: the published shapes of those that the README and
the docs name, so that no Hub is needed; a folder's; or the Hub's."""

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "vocab_size", "tie_word_embeddings", "max_position_embeddings")
SHAPES = {
    "Qwen/Qwen2.5-0.5B": (896, 4864, 24, 14, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B": (1536, 8960, 28, 12, 2, 151936, True, 131072),
    "Qwen/Qwen2.5-3B": (2048, 11008, 36, 16, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B": (3584, 18944, 28, 28, 4, 152064, False, 131072),
}
SHAPES |= {f"{name}-Instruct": (*shape[:-1], 32768) for name, shape in SHAPES.items()}
SHAPES |= {f"Qwen/Qwen2.5-Math-{size}": (*SHAPES[f"Qwen/Qwen2.5-{size}"][:-1], 4096)
           for size in ("1.5B", "7B")}


def config_of(model):
    """The transformers configuration of a folder or an id. Raises ValueError, a sentence."""
    from transformers import AutoConfig, Qwen2Config

    from data import hub
    if model in SHAPES:
        return Qwen2Config(**dict(zip(FIELDS, SHAPES[model], strict=True)))
    try:
        hub.reach(model)
        return AutoConfig.from_pretrained(model)
    except Exception as e:  # there is no end to what can be wrong with a folder, or the Hub
        raise ValueError(f"--model {model} is no folder with a configuration, nor one of "
                         f"{', '.join(SHAPES)}, and as an id of the Hub it cannot be used: "
                         f"{hub.reason(e)}") from None
