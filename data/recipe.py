"""The embedded base's folder, and the settings of a model where they are not those of real models.

recipe.json in a model's folder has them, {"settings": {flag of train.py: value}}; a checkpoint's
those of its model, and how its run has asked. The base's has also the recipe of its training."""

import json
from pathlib import Path

# flags in a checkpoint's recipe.json, over the model's own: eval.py asks as the run did
OF_SAMPLING = "template template_kwargs stop max_tokens max_prompt_tokens".split()
BASE = str(Path(__file__).parent / "base")


def settings_of(model):
    """-> {flag: value} of a model: a folder, an id of the Hub (which has none), or None for the
    embedded base. Raises ValueError for a recipe.json of another shape."""
    path = Path(model or BASE, "recipe.json")
    try:  # is_file raises OSError, too
        return dict(json.loads(path.read_text())["settings"]) if path.is_file() else {}
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f'{path} is not {{"settings": {{flag: value}}}}: {e!r}') from None
