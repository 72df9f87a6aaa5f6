"""The embedded base: a Qwen2-shaped model of 0.86 million parameters with a character tokenizer.

It replaces a real base model where there is no network and no GPU. Half of the later Countdown
demonstrations that it learns from are wrong: it solves some puzzles and can learn the others. It is
an ordinary Hugging Face folder, data/base: sampler, trainer and evaluation treat it as any model.

    python -m study.tiny            trains it again, in about two minutes, and writes data/base
"""

import json
import random
import tempfile
from pathlib import Path

import torch
from tokenizers import AddedToken, pre_tokenizers
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from data import BASE, countdown
from engine.policy import Policy
from examples.sft import demonstrations, fit
from harness.flags import settings_of

RECIPE = dict(seed=0, steps=450, batch=256, lr=3e-3, weight_decay=0.1, demonstrations=40_000,
              wrong=0.5, hidden=128, mlp=512, layers=3, heads=4, tied=False)
MINIATURE = dict(steps=90, batch=32, demonstrations=1024, hidden=32, mlp=32, layers=2, heads=2)

SPECIAL = ["<pad>", "<eos>", "<unk>"]
TAGS = ["<answer>", "</answer>"]  # one token each: the answer's frame should not cost 17 characters


def tokenizer():
    """A tokenizer with a token for each character (outside ASCII for each byte) and for each tag;
    of Qwen2's class, without merges, which transformers loads for any model of type qwen2."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + TAGS + alphabet)}
    tok = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>",
                         unk_token="<unk>")
    tok.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tok


def empty_model(recipe, vocabulary, kind=Qwen2ForCausalLM, positions=4096):
    """The untrained model, as recipe["seed"] has it. A vocabulary begins with <pad> and <eos>."""
    torch.manual_seed(recipe["seed"])
    return kind(kind.config_class(
        vocab_size=vocabulary, hidden_size=recipe["hidden"], intermediate_size=recipe["mlp"],
        num_hidden_layers=recipe["layers"], num_attention_heads=recipe["heads"],
        num_key_value_heads=recipe.get("kv_heads", recipe["heads"]),
        max_position_embeddings=positions, tie_word_embeddings=recipe.get("tied", False),
        bos_token_id=None, eos_token_id=1, pad_token_id=0))


def demonstration(recipe, index):
    """-> prompt and completion for training puzzle `index`: a solution, or a random expression in
    the share `wrong` of the second half of the demonstrations."""
    rng = random.Random(f"{recipe['seed']} {index}")
    nums, target, text = countdown.puzzle("countdown", recipe["seed"], index, "train")
    if index >= recipe["demonstrations"] // 2 and rng.random() < recipe["wrong"]:
        text, _ = countdown.random_expression(rng, nums, countdown.FORMS["countdown"]["operators"])
    return countdown.short_prompt(nums, target), f"<answer>{text}</answer>"


def drawn(recipe, step, count, generator):
    """-> places of `count` demonstrations: right ones in the first half of the steps, then those of
    the second half, of which some are wrong."""
    half = recipe["demonstrations"] // 2
    places = torch.randint(half, (count,), generator=generator)
    return places + half if step >= recipe["steps"] // 2 else places


def train_base(recipe, tok, model, demonstration, batches):
    """Minimises the cross-entropy of the completions' tokens, with AdamW, warm-up and linear decay.
    -> model, tokenizer, loss of the last step. demonstration: recipe, index -> prompt and
    completion. batches: recipe, pairs of these in tokens, generator -> the pairs of each step."""
    steps = recipe["steps"]
    rows = [demonstration(recipe, i) for i in range(recipe["demonstrations"])]
    pairs = demonstrations([dict(prompt=p, completion=c) for p, c in rows], tok, tok.eos_token_id)
    generator = torch.Generator().manual_seed(recipe["seed"])
    loss = fit(Policy(model), batches(recipe, pairs, generator), steps,
               lambda step: min((step + 1) / 30, (steps - step) / (0.7 * steps), 1),
               "training the base", lr=recipe["lr"], weight_decay=recipe["weight_decay"])
    return model.eval(), tok, loss


def batches(recipe, pairs, generator):
    for step in range(recipe["steps"]):
        yield [pairs[i] for i in drawn(recipe, step, recipe["batch"], generator)]


def train(recipe):
    tok = tokenizer()
    return train_base(recipe, tok, empty_model(recipe, len(tok)), demonstration, batches)


def save_base(folder, recipe, train, miniature):
    """Trains a base and writes its folder, in bfloat16; the settings in recipe.json stay.

    train: recipe -> model, tokenizer, last loss. miniature: changes to the recipe that make a base
    in a second. Its loss is written, too: with it tests/test_base.py finds a change to the code."""
    _, _, loss = train({**recipe, **miniature})
    model, tokenizer, _ = train(recipe)
    content = dict(settings=settings_of(folder), trained=recipe, miniature=dict(loss=loss))
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as aside:
        model.bfloat16().save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        Path(aside, "recipe.json").write_text(json.dumps(content, indent=1) + "\n")
        for path in Path(aside).iterdir():
            path.replace(Path(folder, path.name))


if __name__ == "__main__":
    save_base(BASE, RECIPE, train, MINIATURE)
