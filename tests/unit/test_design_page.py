"""docs/design.md lists every lock."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCK = re.compile(r"threading\.(?:Lock|RLock|Condition|Semaphore)\(")


def test_every_lock_is_in_the_table():
    source = ROOT / "src" / "coati"
    locking = {str(path.relative_to(source)) for path in source.rglob("*.py") if LOCK.search(path.read_text())}
    table = re.search(r"\| lock \| guards \|\n(.*?)\n\n", (ROOT / "docs" / "design.md").read_text(), re.DOTALL)
    assert locking == set(re.findall(r"`([\w/]+\.py)`", table[1]))
