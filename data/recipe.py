"""The embedded base, and the settings that a model wants where they are not those of real models.

The base is a Hugging Face folder, data/base. recipe.json in a model's folder has settings,
{"settings": {flag of train.py: value}}; checkpoints carry it on, and a model of one's own may have
one, too. The base's has also what it was trained with.
"""

import json
import tempfile
from pathlib import Path

BASE = str(Path(__file__).parent / "base")


def settings_of(model):
    """-> {flag: value} of a model: a folder, an id of the Hub (which has none), or None for the
    embedded base. Raises ValueError for a recipe.json that holds no such thing."""
    path = Path(model or BASE, "recipe.json")
    try:
        return dict(json.loads(path.read_text())["settings"]) if path.is_file() else {}
    except OSError as e:  # is_file raises it, too: of names too long, without permission
        raise ValueError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f'{path} is not {{"settings": {{flag: value}}}}: '
                         f"{type(e).__name__}: {e}") from None


def save_base(folder, recipe, train, miniature):
    """Trains an embedded base and writes its folder, in bfloat16; the settings in recipe.json stay.

    train: recipe -> model, tokenizer, loss of the last step. miniature: changes to the recipe that
    make a base in a second. Its loss is written, too: where the code that makes the base is
    changed, this loss changes, and tests/test_base.py says that the folder must be made again."""
    _, _, loss = train({**recipe, **miniature})
    model, tokenizer, _ = train(recipe)
    content = dict(settings=settings_of(folder), trained=recipe, miniature=dict(loss=loss))
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as aside:
        model.bfloat16().save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        Path(aside, "recipe.json").write_text(json.dumps(content, indent=1) + "\n")
        for path in Path(aside).iterdir():
            path.replace(Path(folder, path.name))
