"""Keep the demo's base model between runs.

An entry is a folder named after everything that decides its content: grammar, model, recipe. It is built to
the side and moved into place whole, with a manifest of sizes and checksums as the last file written, so a
reader sees a complete entry or none. Two processes that build at once both succeed and the first to finish
wins. An entry that does not match its manifest (a full disk, a power cut, a curious hand) is built again.

Left out: deletion of entries made by older recipes. They are under a megabyte each.
"""

import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coati.demo.grammar import GRAMMAR
from coati.demo.pretrain import (
    DEFAULT_BATCH_SIZE,
    DEFAULT_STEPS,
    PEAK_LEARNING_RATE,
    WARMUP_STEPS,
    ProgressCallback,
    build_model_config,
    pretrain,
)
from coati.demo.tokenizer import build_tokenizer
from coati.errors import ConfigError, DeadlineExceeded

_LOGGER = logging.getLogger(__name__)

RECIPE_VERSION = 1
"""Raise this when `pretrain` or the tokenizer changes in a way that the settings in the key do not show."""

MANIFEST_NAME = "coati_manifest.json"

# Publishing is a check and a rename: milliseconds. A minute means that somebody hangs while holding the lock.
_PUBLISH_DEADLINE_SECONDS = 60.0

# What decides the model's weights; the rest of its config is transformers' bookkeeping and changes with it.
_MODEL_SETTINGS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def default_cache_root() -> Path:
    """Return `$COATI_CACHE`, or `coati` in the user's XDG cache folder (`~/.cache` unless set otherwise)."""
    chosen = os.environ.get("COATI_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rules say that a relative path there is invalid and to be ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "coati"


def ensure_base_model(
    cache_root: Path | None = None,
    *,
    on_progress: ProgressCallback | None = None,
    seed: int = 0,
    steps: int = DEFAULT_STEPS,
    batch_size: int = DEFAULT_BATCH_SIZE,
) -> Path:
    """Return the folder of the demo's base model, training it first if the cache has no sound copy.

    `on_progress` is called only while training. Treat the folder as read-only: an edit makes it unsound, and
    the next call builds it again.

    Example:
        >>> import tempfile
        >>> root = Path(tempfile.mkdtemp())
        >>> folder = ensure_base_model(root, steps=2, batch_size=2)
        >>> folder == ensure_base_model(root, steps=2, batch_size=2)
        True
    """
    root = default_cache_root() if cache_root is None else Path(cache_root)
    entry = root / f"film-base-{_recipe_key(seed=seed, steps=steps, batch_size=batch_size)}"
    fault = find_fault(entry)
    if fault is None:
        return entry
    if entry.exists():
        _LOGGER.warning("The cached base model %s is unsound (%s); building it again.", entry, fault)
    with _open_workshop(root) as workshop:
        built = Path(workshop) / "new"
        pretrain(built, seed=seed, steps=steps, batch_size=batch_size, on_progress=on_progress)
        _write_manifest(built)
        _publish(built, entry, discard=Path(workshop) / "old")
    return entry


def find_fault(entry: Path) -> str | None:
    """Say what is wrong with a cache entry, or return `None` if every file is as its manifest says."""
    try:
        text = (entry / MANIFEST_NAME).read_text(encoding="utf-8")
        files = json.loads(text)["files"]
        expected = {str(name): (int(facts["bytes"]), str(facts["sha256"])) for name, facts in files.items()}
        for name, (size, digest) in expected.items():
            found = (entry / name).stat().st_size
            if found != size:
                return f"{name} has {found} bytes, not {size}"
            if _sha256(entry / name) != digest:
                return f"{name} has the wrong checksum"
    except OSError as error:
        return f"cannot read it: {error}"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest is not ours: {error!r}"
    return None if expected else "the manifest lists no files"


def _open_workshop(root: Path) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder beside the entries, because a rename is atomic only within one file system."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix=".building-", dir=root)
    except OSError as error:
        raise ConfigError(
            f"The cache folder must be a folder we can write to, got {root} ({error}). Set COATI_CACHE to one that is."
        ) from error


def _recipe_key(*, seed: int, steps: int, batch_size: int) -> str:
    config = build_model_config(build_tokenizer())
    recipe = {
        "recipe_version": RECIPE_VERSION,
        "grammar": {symbol: [list(rule) for rule in rules] for symbol, rules in GRAMMAR.items()},
        "model": {name: getattr(config, name) for name in _MODEL_SETTINGS},
        "learning_rate": [PEAK_LEARNING_RATE, WARMUP_STEPS],
        "seed": seed,
        "steps": steps,
        "batch_size": batch_size,
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _write_manifest(folder: Path) -> None:
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.iterdir())}
    text = json.dumps({"recipe_version": RECIPE_VERSION, "files": files}, indent=2)
    (folder / MANIFEST_NAME).write_text(text + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _publish(built: Path, entry: Path, *, discard: Path) -> None:
    """Move `built` to `entry`, unless somebody else's sound entry got there first."""
    # Without the lock we might judge an entry unsound and then move away the sound one that replaced it.
    with _locked(entry.with_suffix(".lock")):
        if find_fault(entry) is None:
            return
        if entry.exists():
            os.replace(entry, discard)
        os.replace(built, entry)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`. The system releases it if we die."""
    deadline = time.monotonic() + _PUBLISH_DEADLINE_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineExceeded(
                        f"Waited {_PUBLISH_DEADLINE_SECONDS:.0f} s for another process to release {path}. "
                        "End that process, or set COATI_CACHE to another folder."
                    ) from None
                time.sleep(0.05)
        yield
