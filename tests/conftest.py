import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def base():
    """The folder of the embedded base: from the cache, or built (about two and a half minutes)."""
    from data import tiny

    return tiny.base_model()


@pytest.fixture(scope="session")
def tokenizer():
    from data import tiny

    return tiny.tokenizer()


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """small(tied) -> the folder of an untrained model, smaller than the base."""
    from data import tiny

    def make(tied=False):
        folder = tmp_path_factory.mktemp(f"small-{tied}")
        tok = tiny.tokenizer()
        recipe = dict(tiny.RECIPE, hidden=64, mlp=96, layers=2, heads=2, tied=tied, seed=5)
        model = tiny.empty_model(recipe, len(tok))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3)  # an untrained model is all but uniform; this one has opinions
        for part in (model, tok):
            part.save_pretrained(folder)
        return str(folder)

    return make
