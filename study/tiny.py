"""The embedded base: a Qwen2-shaped model of 0.8 million parameters with a character tokenizer.

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
from tqdm import tqdm
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from data import countdown
from data.recipe import BASE, settings_of

RECIPE = dict(seed=0, steps=450, batch=256, lr=3e-3, weight_decay=0.1, demonstrations=40_000,
              wrong=0.5, hidden=128, mlp=512, layers=3, heads=4, tied=False)
MINIATURE = dict(steps=90, batch=32, demonstrations=1024, hidden=32, mlp=32, layers=2, heads=2)

SPECIAL = ["<pad>", "<eos>", "<unk>"]
TAGS = ["<answer>", "</answer>"]  # one token each: the answer's frame should not cost 17 characters


def tokenizer():
    """A tokenizer with a token for each character (outside ASCII for each byte) and for each tag.

    It is of Qwen2's class, without merges: transformers loads that class for the model type qwen2,
    also where another was saved."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(SPECIAL + TAGS + alphabet)}
    tok = Qwen2Tokenizer(vocabulary, merges=[], pad_token="<pad>", eos_token="<eos>",
                         unk_token="<unk>")
    tok.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return tok


def empty_model(recipe, vocabulary):
    """The untrained model, its weights a function of recipe["seed"]."""
    torch.manual_seed(recipe["seed"])
    model = Qwen2ForCausalLM(Qwen2Config(
        vocab_size=vocabulary, hidden_size=recipe["hidden"], intermediate_size=recipe["mlp"],
        num_hidden_layers=recipe["layers"], num_attention_heads=recipe["heads"],
        num_key_value_heads=recipe["heads"], max_position_embeddings=4096,
        tie_word_embeddings=recipe["tied"], bos_token_id=None,
        eos_token_id=SPECIAL.index("<eos>"), pad_token_id=SPECIAL.index("<pad>")))
    model.generation_config.eos_token_id = SPECIAL.index("<eos>")
    return model


def demonstration(recipe, index):
    """-> prompt and completion for training puzzle `index`: a solution, or a random expression in
    the share `wrong` of the second half of the demonstrations."""
    rng = random.Random(f"{recipe['seed']} {index}")
    nums, target, text = countdown.puzzle("countdown", recipe["seed"], index, "train")
    if index >= recipe["demonstrations"] // 2 and rng.random() < recipe["wrong"]:
        text, _ = countdown.random_expression(rng, nums, countdown.FORMS["countdown"]["operators"])
    return countdown.short_prompt(nums, target), f"<answer>{text}</answer><eos>"


def train(recipe):
    """-> model, tokenizer, loss of the last step. Minimises the cross-entropy of the completions'
    tokens, with AdamW, warm-up and linear decay."""
    tok = tokenizer()
    model = empty_model(recipe, len(tok))
    texts = [demonstration(recipe, i) for i in range(recipe["demonstrations"])]
    pairs = list(zip(*(tok(list(column))["input_ids"] for column in zip(*texts))))
    ids = torch.zeros(len(pairs), max(len(p) + len(c) for p, c in pairs), dtype=torch.long)
    in_completion = torch.zeros_like(ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(pairs):
        ids[row, :len(prompt) + len(completion)] = torch.tensor(prompt + completion)
        in_completion[row, len(prompt):len(prompt) + len(completion)] = True

    steps = recipe["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe["lr"], betas=(0.9, 0.95),
                                  weight_decay=recipe["weight_decay"])
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 30, (steps - s) / (0.7 * steps), 1))
    generator = torch.Generator().manual_seed(recipe["seed"])
    bar, half = tqdm(range(steps), desc="training the embedded base", unit="step"), len(ids) // 2
    for step in bar:
        # the first half of the steps sees right demonstrations alone, the second half mixed ones
        first = half if step >= steps // 2 else 0
        rows = torch.randint(half, (recipe["batch"],), generator=generator) + first
        hidden = model.model(input_ids=ids[rows], use_cache=False).last_hidden_state[:, :-1]
        learnt = in_completion[rows, 1:]
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[learnt]),
                                                 ids[rows, 1:][learnt])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    return model.eval(), tok, loss.item()


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
