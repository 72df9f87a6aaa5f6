"""Checksums of what a run's numbers depend on: problems, weights, code of method and verifiers."""

import inspect
import json
import zlib
from contextlib import suppress
from pathlib import Path

import losses
from data import hub


def of_problems(problems):
    return zlib.crc32(json.dumps(problems, sort_keys=True, default=str).encode())


def names_in(code):
    """The names that a function's code reads, in its comprehensions and inner functions, too."""
    return {*code.co_names}.union(*(names_in(x) for x in code.co_consts if inspect.iscode(x)))


def of_functions(functions):
    """-> {name: checksum of its text} of functions and of those of their modules that they call;
    of all that share a name, as lambdas do. One that was typed in, or is built in, has none."""
    found, seen, waiting = {}, set(), [*functions]
    while waiting:
        f = inspect.unwrap(waiting.pop())
        code, there = getattr(f, "__code__", None), getattr(f, "__globals__", {})
        if code and code not in seen:
            seen.add(code)
            with suppress(OSError):
                text = inspect.getsource(f).encode()
                found[f.__name__] = zlib.crc32(text, found.get(f.__name__, 0))
                waiting += [there[name] for name in sorted(names_in(code)) if inspect.isfunction(
                    there.get(name)) and there[name].__module__ == f.__module__]
    return found


def of_method(loss, method, correction):
    """-> that of a row of METHODS with its values, of a correction, and of what all rows share."""
    text = losses.describe(loss, losses.METHODS[loss])
    corrections = [f for f, _ in losses.chosen_corrections(correction)] if correction else []
    return {f"METHODS[{loss!r}]": zlib.crc32(text.encode()),
            "Tokens": zlib.crc32(inspect.getsource(losses.Tokens).encode()),
            **of_functions([*method.functions, *corrections, losses.policy_loss,
                            losses.group_advantages])}


def of_weights(model):
    """-> a checksum of 64 pieces of each file of weights in a model's folder; the commit of an id
    of the Hub; None where there is neither: loading the model says so."""
    folder, checksum = Path(model), 0
    if not folder.exists():
        with suppress(Exception):  # the Hub's clients may raise anything
            hub.reach(model)
            from huggingface_hub import hf_hub_download
            return Path(hf_hub_download(model, "config.json")).parent.name
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            for place in range(0, size, size // 64 + 1):
                file.seek(place)
                checksum = zlib.crc32(file.read(2**16), checksum)
    return checksum or None
