"""The Hugging Face Hub. Its cache is HF_HOME; HF_HUB_OFFLINE=1 reads the cache alone."""

import os


def reach(name):
    """Raises ConnectionError if `name` is an id and the Hub silent; its clients try for minutes."""
    from huggingface_hub import constants, get_session
    try:
        if not os.path.exists(name) and not constants.is_offline_mode():
            get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as e:  # of the HTTP client, whose classes change with its versions
        raise ConnectionError(f"{constants.ENDPOINT} does not answer ({e}); HF_HUB_OFFLINE=1 reads "
                              "the cache") from None


def reason(error):
    """-> one clause of an error of the Hub's clients: its first paragraph that says something."""
    first, *rest = str(error).strip().split("\n\n")
    words = (rest[0] if rest and " Error. (" in first else first).split()  # 404 Client Error. (...)
    return " ".join(words)[:300] or type(error).__name__
