"""Is there such a reward function? Answered from source text alone: importing it may take torch along."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def find_reward_problem(
    key: str, function: str, search_paths: Sequence[Path], columns: Sequence[str] | None = None
) -> str:
    """Say what is wrong with a reward function given as "module:function"; empty when nothing is known to be.

    Args:
        key: the setting that named it.
        function: "module:function".
        search_paths: folders that are searched before `sys.path`.
        columns: the dataset's columns, where they are known: a parameter without a default must be one of them.
    """
    module, _, name = function.partition(":")
    spec = find_module(module, search_paths)
    if spec is None:
        searched = ", ".join(dict.fromkeys(map(str, search_paths))) or "no folder"
        return (
            f"{key} must name a module that can be found, got {function!r}, but there is no module "
            f"{module!r} in "
            f"{searched} or the installed packages. Check the name, or add its folder to reward.search_paths."
        )
    if spec.origin is None or not spec.origin.endswith(".py"):
        return ""  # compiled or built in: only the import can tell
    try:
        tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    except SyntaxError as error:
        return (
            f"{key} must name a module that Python can read, got {function!r}, but "
            f"{spec.origin}:{error.lineno} has a "
            f"syntax error ({error.msg}). Correct that line."
        )
    except (OSError, UnicodeDecodeError, ValueError):
        return ""  # odd source encodings and the like: only the import can tell
    if problem := _signature_problem(key, function, tree, columns):
        return problem
    names = set(_defined_names(tree.body))
    # A star import or a module-level __getattr__ can supply any name.
    if name in names or "*" in names or "__getattr__" in names:
        return ""
    close = difflib.get_close_matches(name, names, n=3)
    callables = sorted(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    hint = f"Did you mean {', '.join(close)}?" if close else f"It defines {', '.join(callables) or 'no function'}."
    return f"{key} must name a function in its module, got {function!r}, but {spec.origin} has no {name!r}. {hint}"


def _signature_problem(key: str, function: str, tree: ast.Module, columns: Sequence[str] | None) -> str:
    """A parameter that nothing will be passed for, as far as the source tells."""
    name = function.partition(":")[2]
    definitions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    if columns is None or len(definitions) != 1 or definitions[0].decorator_list:
        return ""
    arguments = definitions[0].args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [argument.arg for argument in positional[: len(positional) - len(arguments.defaults)]]
    required += [
        argument.arg
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    known = {"prompts", "completions", *columns}
    if unknown := [argument for argument in required if argument not in known]:
        return (
            f"{key} {function!r} has a parameter {unknown[0]!r}, but a reward gets prompts, completions and the "
            f"dataset's columns ({', '.join(sorted(columns)) or 'none'}). Rename it, give it a default, or add "
            "the column."
        )
    return ""


def find_module(module: str, search_paths: Sequence[Path]) -> ModuleSpec | None:
    """Find a module by its dotted name without importing it or any package above it.

    `importlib.util.find_spec("a.b")` would import `a`; walking down the parts by hand imports nothing.
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


def _defined_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements at module level bind, also inside if, try, with and loops."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            yield from (
                inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
            )
            for block in ("body", "orelse", "finalbody"):
                yield from _defined_names(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _defined_names(handler.body)
