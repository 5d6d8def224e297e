"""docs/metrics.md and the source name the same metrics."""

import ast
import functools
import re
from pathlib import Path

from metric_table import DOCUMENTED

import coati

SOURCE = Path(coati.__file__).parent
AREAS = "|".join(sorted({name.partition("/")[0] for name in DOCUMENTED}))


@functools.cache
def named_in_source():
    """Return the names of metrics in the source, and patterns for the names that f-strings build there."""
    names, patterns = set(), set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and re.fullmatch(rf"({AREAS})/[a-z0-9_]*[a-z0-9]", str(node.value)):
                names.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [re.escape(part.value) if isinstance(part, ast.Constant) else ".+" for part in node.values]
                patterns.add("".join(parts))
    return names, [pattern for pattern in patterns if re.match(rf"({AREAS})/", pattern)]


def test_every_metric_in_the_source_is_in_the_table():
    names, _ = named_in_source()
    assert len(names) > 40
    assert names - DOCUMENTED == set(), "describe them in docs/metrics.md, with a healthy range"


def test_every_metric_in_the_table_is_in_the_source():
    names, patterns = named_in_source()
    unknown = {name for name in DOCUMENTED - names if not any(re.fullmatch(pattern, name) for pattern in patterns)}
    assert unknown == set(), "docs/metrics.md describes metrics that no run writes"
