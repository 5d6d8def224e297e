"""Benchmarks run rarely, so this checks that everything they import from coati still exists."""

import ast
import importlib
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).resolve().parents[3] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_what_a_benchmark_imports_from_coati_exists(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("coati"):
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
