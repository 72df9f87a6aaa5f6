"""A model as a user names it: what can be said of it before its weights are read."""

import re
from pathlib import Path

import data
from data import hub
from experiment.files import checkpoint_folders


def folder_fault(model):
    """What is wrong with a path that is to be a model's folder; None where nothing is, and for an
    id of the Hub."""
    folder = Path(model)
    run = folder.parent if folder.name == "checkpoints" else folder
    if (run / "metrics.jsonl").exists():
        checkpoints = checkpoint_folders(run)
        advice = (f"{checkpoints[-1]} is its newest checkpoint" if checkpoints
                  else "it has no checkpoint yet")
        return f"--model {model} is a run's folder, not a model's; {advice}"
    if folder.exists() and not (folder / "config.json").exists():
        return f"--model {model} is not a Hugging Face folder: it has no config.json"
    return None


def read_tokenizer(model, problems, template):
    """-> the tokenizer, the ids that end a completion, the most tokens of a sequence, and the
    tokens of each problem's prompt. Raises ValueError, a sentence, for a model that cannot make
    prompts of the problems."""
    from transformers import AutoTokenizer  # takes seconds: not before flags are refused

    from engine.loading import eos_ids, positions_of
    of_hub = re.fullmatch(r"\w[^/]*(/[^/]+)?", model)  # NAME or OWNER/NAME
    if not of_hub and not Path(model).exists():
        raise ValueError(f"--model {model}: there is no such folder")
    try:
        hub.reach(model)
        tokenizer = AutoTokenizer.from_pretrained(model)
        eos, positions = eos_ids(model, tokenizer), positions_of(model)
    except Exception as e:  # there is no end to what can be wrong with a folder
        where = ("cannot be used" if Path(model).exists()
                 else "is no folder here, and as an id of the Hub it cannot be used")
        raise ValueError(f"--model {model} {where}: {hub.reason(e)}") from None
    if not eos:
        raise ValueError(f"--model {model} names no end-of-sequence token, in its tokenizer or its "
                         "configuration")
    lengths = [prompt_length(model, tokenizer, problem, template) for problem in problems]
    if not min(lengths):
        raise ValueError(f"--model {model}: its tokenizer makes nothing of a prompt; are its files "
                         "complete?")
    return tokenizer, eos, positions, lengths


def prompt_length(model, tokenizer, problem, template):
    """The tokens of a problem's prompt. Raises ValueError, a sentence, where the tokenizer or its
    chat template cannot make them: a tokenizer of words may lack one of the prompt's."""
    try:
        return len(data.encode(tokenizer, problem, template))
    except Exception as e:  # a chat template is a program, which can raise what it likes
        start = repr(str(problem["prompt"])[:60])
        raise ValueError(f"--model {model}: its tokenizer cannot encode the prompt of problem "
                         f"{problem['id']}, which begins {start} ({hub.reason(e)}); take other "
                         "problems, another model or another --template") from None
