"""The names of metrics in docs/metrics.md."""

import re
from pathlib import Path

DOCUMENTED = frozenset(
    re.findall(
        r"^\| `([a-z0-9_]+/[a-z0-9_]+)` \| \S.*\. \| \S.* \|$",
        (Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
)
