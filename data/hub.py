"""The Hugging Face Hub: the rows of a set, and what its clients' errors mean.

What is read stays in the Hub's cache (HF_HOME). A second run reads the cache, and so does one with
HF_HUB_OFFLINE=1.
"""

import json
import os
import sys
from pathlib import Path

GATED = ("it is gated: accept the conditions on its page on the Hub, then log in with "
         "`hf auth login` or set HF_TOKEN")
MISSING = ("the Hub has no such repository, or it is private: look at the id, and log in with "
           "`hf auth login` or set HF_TOKEN for a private one")
TOKEN = "the Hub does not take the token: log in anew with `hf auth login`, or correct HF_TOKEN"
NO_ID = "there is no such folder, and an id on the Hub is OWNER/NAME"
OFFLINE = ("it is not in the cache, and HF_HUB_OFFLINE forbids to fetch it: load it once without "
           "HF_HUB_OFFLINE")
AWAY = "the Hub at {endpoint} does not answer{why}, and the cache lacks it: look at the connection"
BROKEN = "the connection broke off in the middle of a file: try again"
BUSY = "the Hub answers {status}: try again later"

silence = []  # why the Hub was given up in this process, see `reach`


def reach(name, kind):
    """Where nobody answers for the Hub, makes this process and its children read the cache alone.

    name: an id; a folder needs no Hub. kind: "dataset" or "model". HF_HUB_ETAG_TIMEOUT (10 seconds)
    bounds the question. Without it the clients try for half a minute for each set, for longer where
    packets vanish, and some of their questions have no bound at all, even if all is in the cache.
    """
    from huggingface_hub import HfApi, constants, errors
    if Path(name).is_dir() or constants.is_offline_mode():
        return
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (errors.HfHubHTTPError, errors.HFValidationError):
        pass  # an answer, or no id at all: the clients say more of it
    except Exception as e:  # of the HTTP client, whose classes change with its versions
        silence.append(f"{type(e).__name__}: {e}")
        os.environ["HF_HUB_OFFLINE"] = "1"  # for processes to come
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:  # it has a copy
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True


def rows(spec, split, files=None):
    """Yields the rows of a set of data/sets.py, as dicts.

    files: the names of its data files in the repository, which are then read one by one, for a set
    that is no plain table there. Raises whatever the Hub's clients raise; see `reason`."""
    reach(spec.hub, "dataset")
    if files is None:
        from datasets import load_dataset
        columns = dict(columns=list(spec.columns)) if spec.columns else {}
        yield from load_dataset(spec.hub, spec.config, split=spec.splits[split], **columns)
        return
    from huggingface_hub import hf_hub_download
    for name in files:
        path = hf_hub_download(spec.hub, name, repo_type="dataset")
        # a file may be larger than the memory: its rows are read a few at a time
        if name.endswith(".parquet"):
            from pyarrow.parquet import ParquetFile
            for batch in ParquetFile(path).iter_batches(64, columns=spec.columns):
                yield from batch.to_pylist()
        else:
            with open(path, "rb") as file:
                yield from (json.loads(line) for line in file if line.strip())


def reason(error):
    """-> one clause on why a data set or a model could not be had, and what to do about it.

    error: what datasets, huggingface_hub or transformers raised. These wrap errors in others whose
    first line leads astray, so that the first cause decides where it is known."""
    from huggingface_hub import constants, errors
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    # by name, because the client of huggingface_hub has been requests, httpx and httpx2
    kinds = {kind.__name__ for e in chain for kind in type(e).__mro__}
    texts = " ".join(map(str, chain))
    status = next((e.response.status_code for e in chain if isinstance(e, errors.HfHubHTTPError)),
                  None)
    # datasets drops the causes of some errors and says in words what they were
    if "GatedRepoError" in kinds or "is a gated dataset" in texts:
        return GATED
    if "RepositoryNotFoundError" in kinds or "doesn't exist on the Hub" in texts:
        return MISSING
    if "HFValidationError" in kinds:
        return NO_ID
    if status == 401:
        return TOKEN
    unreached = kinds & {"ConnectionError", "ConnectError", "TimeoutException", "Timeout",
                         "LocalEntryNotFoundError"} or "LocalEntryNotFoundError" in texts
    if constants.is_offline_mode() and (unreached or "Couldn't find cache for" in texts):
        return (AWAY.format(endpoint=constants.ENDPOINT, why=f" ({silence[0]})") if silence
                else OFFLINE)
    if status and (status in (408, 429) or status >= 500):
        return BUSY.format(status=status)
    if "RemoteProtocolError" in kinds or "Consistency check failed" in texts:
        return BROKEN
    if unreached:
        return AWAY.format(endpoint=constants.ENDPOINT, why="")
    # the first paragraph: some break lines within a sentence
    return " ".join(str(chain[0]).strip().split("\n\n")[0].split()) or type(chain[0]).__name__
