"""Checksums of what a run's numbers depend on: problems, weights, code of method and verifiers."""

import ast
import functools
import inspect
import json
import zlib
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file

import losses
from data import hub

ROOT = Path(losses.__file__).resolve().parent
# tables that name every row and verifier, of which a run depends on its own alone
TABLES = {"METHODS", "BY_ADVANTAGE", "CORRECTIONS", "REWARDS"}


def of_problems(problems):
    return zlib.crc32(json.dumps(problems, sort_keys=True, default=str).encode())


# ---------------------------------------------------------------------------- code

@functools.cache
def definitions(module):
    """-> {name: the statements that define it at a module's top level, without docstrings; or the
    MODULE.NAME that it is imported from}. {} for a module that is not the project's."""
    path, found = ROOT / module.replace(".", "/"), {}
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    for statement in tree.body:
        targets = getattr(statement, "targets", [getattr(statement, "target", ast.Pass())])
        names = [node.id for target in targets for node in ast.walk(target)
                 if isinstance(node, ast.Name)]
        for name in names or [getattr(statement, "name", None)]:
            found.setdefault(name, []).append(statement)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            place = f"{getattr(node, 'module', '')}.{alias.name}".strip(".")
            found.setdefault(alias.asname or alias.name, place)
    return found


def reach(module, name, found):
    """Adds {"MODULE.NAME": checksum} of a definition and of all that it names in the project."""
    definition, key = definitions(module).get(name), f"{module}.{name}"
    if isinstance(definition, str):
        module, _, name = definition.rpartition(".")
        return reach(module, name, found)
    if not definition or key in found or name in TABLES:
        return
    found[key] = zlib.crc32("\n".join(map(ast.unparse, definition)).encode())
    for node in [node for statement in definition for node in ast.walk(statement)]:
        if isinstance(node, ast.Name):
            reach(module, node.id, found)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            imported = definitions(module).get(node.value.id)
            if isinstance(imported, str):
                reach(imported, node.attr, found)


def of_code(functions):
    """-> {"MODULE.NAME": checksum} of functions and of all that they name in the project. One that
    no module of the project defines at its top level, such as a lambda, counts by its text."""
    found = {}
    for f in map(inspect.unwrap, functions):
        key = f"{f.__module__}.{getattr(f, '__name__', '')}"
        reach(*key.rsplit(".", 1), found)
        if key not in found:
            with suppress(OSError, TypeError):  # typed in, or no function
                found[key] = zlib.crc32(inspect.getsource(f).encode())
    if "graders.sandbox.RUNNER" in found:  # another file's text
        reach("graders.runner", "main", found)
    return found


def of_method(loss, method, correction):
    """-> that of a row of METHODS, whose functions are those of `method`, and of a correction."""
    row = losses.METHODS[loss]
    text = f"{losses.describe(loss, row)} {row.old_logprobs}"
    return {f"losses.METHODS[{loss!r}]": zlib.crc32(text.encode()), **of_code(
        [*method.functions, losses.CORRECTIONS.get(correction, method.select),
         losses.group_advantages, losses.loss_terms, losses.Tokens, losses.Method])}


# ---------------------------------------------------------------------------- weights

def of_weights(model):
    """-> a checksum of 64 KB from the middle of each tensor in a model's folder; the commit of an
    id of the Hub; None where there is neither, or a damaged one: loading the model says so."""
    folder, checksum = Path(model), 0
    with suppress(Exception):  # a file, and the Hub's clients, may raise anything
        if not folder.exists():
            from huggingface_hub import hf_hub_download
            hub.reach(model)
            return Path(hf_hub_download(model, "config.json")).parent.name
        for path in sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]):
            weights = load_file(path) if path.suffix == ".safetensors" else torch.load(
                path, map_location="cpu", weights_only=True, mmap=True)
            for _, weight in sorted(weights.items()):
                content = weight.flatten().view(torch.uint8)  # mapped: the rest is not read
                middle = content[max(0, len(content) // 2 - 2**15):][:2**16]
                checksum = zlib.crc32(middle.numpy().tobytes(), checksum)
        return checksum
    return None
