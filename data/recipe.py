"""The settings that a model wants where they are not those of real models: recipe.json in its
folder, {"settings": {flag of train.py: value}}.

The embedded bases have such a file, and so has every model that is made of them: checkpoints carry
it on. A model of one's own may have one, too.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

# for models of at most a million parameters; the defaults of the flags are for real ones
WORKED = dict(rollouts=30, problems_per_rollout=32, max_tokens=72, max_prompt_tokens=16, lr=1e-4,
              rank_every=10, tokens_per_micro_batch=4096)
EMBEDDED = dict(rollouts=50, max_tokens=16, max_prompt_tokens=32, lr=5e-5, rank_every=10,
                tokens_per_micro_batch=4096)


def cached_base(name, recipe, settings, code, train):
    """The folder of an embedded base, which is trained first where the cache lacks it.

    Its name is a hash of the recipe and of the files `code` that carry it out. train: recipe ->
    model, tokenizer. settings: what recipe.json says of flags."""
    text = json.dumps(recipe, sort_keys=True) + "".join(Path(file).read_text() for file in code)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanorlvr"
    folder = cache / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=cache))
        for part in train(recipe):
            part.save_pretrained(unfinished)
        content = dict(settings=settings, trained=recipe)
        (unfinished / "recipe.json").write_text(json.dumps(content, indent=1))
        try:
            # renamed in one piece: a build that is cut off leaves nothing that looks like a model
            unfinished.rename(folder)
        except OSError:
            shutil.rmtree(unfinished)  # another process was first, with the same weights
    return str(folder)


def base_of(problems):
    """The folder of the embedded base for the data set `problems`; see base_model there."""
    if problems == "worked":
        from data import worked
        return worked.base_model()
    from data import tiny  # imports transformers, which takes seconds
    return tiny.base_model()


def settings_of(model, problems="countdown"):
    """-> {flag: value} of a model: a folder, an id of the Hub (which has none), or None for the
    embedded base of a data set. Raises ValueError for a recipe.json that holds no such thing."""
    if model is None:
        return WORKED if problems == "worked" else EMBEDDED
    path = Path(model, "recipe.json")
    try:
        return dict(json.loads(path.read_text())["settings"]) if path.is_file() else {}
    except OSError as e:  # is_file raises it, too: of names too long, without permission
        raise ValueError(f"{path} cannot be read: {e.strerror}") from None
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise ValueError(f'{path} is not {{"settings": {{flag: value}}}}: '
                         f"{type(e).__name__}: {e}") from None
