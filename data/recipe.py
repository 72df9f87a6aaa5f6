"""The settings that a model wants where they are not those of real models: recipe.json in its
folder, {"settings": {flag of train.py: value}}.

The embedded base has such a file, and so has every model that is made of it: checkpoints carry it
on. A model of one's own may have one, too.
"""

import json
from pathlib import Path

# for a model of a million parameters; the defaults of the flags are for real ones
EMBEDDED = dict(rollouts=50, max_tokens=16, max_prompt_tokens=32, lr=5e-5, rank_every=10,
                tokens_per_micro_batch=4096)


def settings_of(model):
    """-> {flag: value} of a model: a folder, an id of the Hub (which has none), or None for the
    embedded base. Raises ValueError for a recipe.json that holds no such thing."""
    if model is None:
        return EMBEDDED
    path = Path(model, "recipe.json")
    try:
        return dict(json.loads(path.read_text())["settings"]) if path.is_file() else {}
    except OSError as e:  # is_file raises it, too: of names too long, without permission
        raise ValueError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f'{path} is not {{"settings": {{flag: value}}}}: '
                         f"{type(e).__name__}: {e}") from None
