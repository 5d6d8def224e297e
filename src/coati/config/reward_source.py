"""Finds a reward function by its source text alone, because importing it may import torch."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def find_reward_problem(
    key: str, function: str, search_paths: Sequence[Path], columns: Sequence[str] | None = None
) -> str | None:
    """Find what is wrong with a reward function that the setting `key` gives as "module:function".

    `columns` are the dataset's, where they are known: a parameter without a default must be one of them.
    """
    module, _, name = function.partition(":")
    spec = find_module(module, search_paths)
    if spec is None:
        searched = ", ".join(dict.fromkeys(map(str, search_paths))) or "no folder"
        return (
            f"{key} {function!r}: there is no module {module!r} in {searched} or the installed packages. Check the "
            "name, or add its folder to reward.search_paths."
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None  # compiled or built in: only the import can tell
    try:
        source = Path(spec.origin).read_text(encoding="utf-8")
        tree = ast.parse(source)
    except SyntaxError as error:
        return f"{key} {function!r}: {spec.origin}:{error.lineno} has a syntax error ({error.msg}). Correct that line."
    except (OSError, UnicodeDecodeError, ValueError):
        return None  # odd source encodings and the like: only the import can tell
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    if name in functions:
        return _signature_problem(key, function, functions[name], columns)
    if re.search(rf"\b{name}\b|import \*|__getattr__", source):
        return None  # it may be defined in another way
    close = difflib.get_close_matches(name, functions, n=3)
    hint = f"Did you mean {', '.join(close)}?" if close else f"It defines {', '.join(functions) or 'no function'}."
    return f"{key} {function!r}: {spec.origin} has no {name!r}. {hint}"


def _signature_problem(
    key: str, function: str, node: ast.FunctionDef | ast.AsyncFunctionDef, columns: Sequence[str] | None
) -> str | None:
    """Find a parameter that nothing will be passed for, as far as the source tells."""
    if columns is None or node.decorator_list:
        return None
    positional = [*node.args.posonlyargs, *node.args.args]
    required = positional[: len(positional) - len(node.args.defaults)]
    required += [
        arg for arg, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if default is None
    ]
    for argument in required:
        if argument.arg not in ("prompts", "completions", *columns):
            return (
                f"{key} {function!r} has a parameter {argument.arg!r}, but a reward gets prompts, completions and the "
                f"dataset's columns ({', '.join(sorted(columns)) or 'none'}). Rename it, give it a default, or add the "
                "column."
            )
    return None


def find_module(module: str, search_paths: Sequence[Path]) -> ModuleSpec | None:
    """Find a module by its dotted name without importing it or any package above it.

    `importlib.util.find_spec("a.b")` would import `a`.
    """
    importlib.invalidate_caches()  # a file written a moment ago must be seen
    first, *rest = module.split(".")
    spec = PathFinder.find_spec(first, [*map(str, search_paths), *sys.path])
    if spec is None:  # built in, frozen, or an editable install with a finder of its own
        try:
            spec = importlib.util.find_spec(first)
        except ValueError:  # modules such as __main__ have no spec
            return None
    name = first
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec
