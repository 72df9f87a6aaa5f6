"""What a run's numbers depend on: checksums of problems and weights, and its code, by name."""

import ast
import inspect
import json
import symtable
import zlib
from contextlib import suppress
from pathlib import Path

import losses
import rewards
from data import sources

# as this process imported them; a run's folder keeps copies
CODE = {f"{module.__name__}.py": inspect.getsource(module) for module in (losses, rewards)}


def of_problems(problems):
    return zlib.crc32(json.dumps(problems, sort_keys=True, default=str).encode())


def global_names(scope):
    """The names in a symtable's scope that are not local to it, or to one within."""
    found = {x.get_name() for x in scope.get_symbols() if x.is_global()}
    return found.union(*map(global_names, scope.get_children()))


def reached(tree, roots):
    """-> {name: its text, without comments and layout} of what these names, as METHODS['fade'],
    reach by name in a module's tree: functions, classes and rows of tables."""
    nodes, found, waiting = {}, {}, [*roots]
    for node in tree.body:
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                nodes[node.name] = node
            case ast.Assign([ast.Name(table)], ast.Dict(keys, rows)):
                nodes |= {f"{table}[{ast.unparse(k)}]": x for k, x in zip(keys, rows) if k}
            case ast.Assign([ast.Name()], ast.Tuple([ast.Name(), *_]) | ast.Set([ast.Name(), *_])):
                pass  # a list of functions: a new one changes no run
            case ast.Assign([ast.Name() | ast.Subscript() as target], value):
                nodes[ast.unparse(target)] = value  # or a row, below its table
    while waiting:
        name = waiting.pop()
        if node := nodes.pop(name, None):
            found[name] = ast.unparse(node)
            waiting += global_names(symtable.symtable(found[name], name, "exec"))
    return found


def of_weights(model):
    """-> a checksum of 64 pieces of each file of weights in a model's folder; the commit of an id
    of the Hub; None where there is neither: loading the model says so."""
    folder, checksum = Path(model), 0
    if not folder.exists():
        with suppress(Exception):  # the Hub's clients may raise anything
            sources.reach(model)
            from huggingface_hub import hf_hub_download
            return Path(hf_hub_download(model, "config.json")).parent.name
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        with open(path, "rb") as file:
            for place in range(0, size, size // 64 + 1):
                file.seek(place)
                checksum = zlib.crc32(file.read(2**16), checksum)
    return checksum or None
