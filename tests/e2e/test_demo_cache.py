import fcntl
import threading
from pathlib import Path

import pytest

from coati.demo import cache
from coati.demo.cache import MANIFEST_NAME, default_cache_root, ensure_base_model, find_fault
from coati.errors import ConfigError, DeadlineExceeded


class Builds:
    """Counts the trainings, by the first step of each."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, step: int, steps: int, loss: float) -> None:
        self.count += step == 1


def _ensure(root: Path, on_progress: Builds | None = None, **changes: int) -> Path:
    return ensure_base_model(root, on_progress=on_progress, **{"steps": 1, "batch_size": 2, **changes})


def test_built_once_then_found(tmp_path: Path):
    builds = Builds()
    entry = _ensure(tmp_path, builds)
    assert _ensure(tmp_path, builds) == entry
    assert builds.count == 1
    assert {"config.json", "model.safetensors", "tokenizer.json", MANIFEST_NAME} <= {p.name for p in entry.iterdir()}
    assert not list(tmp_path.glob(".building-*"))


def _flip_a_byte(entry: Path) -> None:
    path = entry / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (_flip_a_byte, "wrong checksum"),
        (lambda entry: (entry / "tokenizer.json").write_text("{}"), "has 2 bytes"),
        (lambda entry: (entry / "config.json").unlink(), "config.json"),
        (lambda entry: (entry / MANIFEST_NAME).unlink(), MANIFEST_NAME),
        (lambda entry: (entry / MANIFEST_NAME).write_text('{"files": {"mod'), "manifest is not ours"),
        (lambda entry: (entry / MANIFEST_NAME).write_text('{"files": []}'), "manifest is not ours"),
        (lambda entry: (entry / MANIFEST_NAME).write_text('{"files": {}}'), "no files"),
    ],
)
def test_an_unsound_entry_is_named_and_rebuilt(tmp_path: Path, damage, fault, caplog):
    entry = _ensure(tmp_path)
    sound = (entry / "model.safetensors").read_bytes()
    damage(entry)
    assert fault in str(find_fault(entry))
    builds = Builds()
    assert _ensure(tmp_path, builds) == entry
    assert builds.count == 1
    assert find_fault(entry) is None
    assert (entry / "model.safetensors").read_bytes() == sound
    assert fault in caplog.text


def test_the_key_follows_the_recipe(tmp_path: Path, monkeypatch):
    entries = {_ensure(tmp_path), _ensure(tmp_path, seed=1), _ensure(tmp_path, batch_size=3)}
    monkeypatch.setattr(cache, "RECIPE_VERSION", cache.RECIPE_VERSION + 1)
    entries.add(_ensure(tmp_path))
    monkeypatch.setattr(cache, "GRAMMAR", {**cache.GRAMMAR, "PERSON": cache.GRAMMAR["PERSON"][:1]})
    entries.add(_ensure(tmp_path))
    assert len(entries) == 5


def test_an_interrupted_build_leaves_nothing(tmp_path: Path):
    def stop(step: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_base_model(tmp_path, steps=1, batch_size=2, on_progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_the_first_of_two_builders_wins(tmp_path: Path):
    """The second finds a sound entry when it comes to publish, and leaves it alone."""
    inodes: list[int] = []

    def other_finishes_first(step: int, steps: int, loss: float) -> None:
        entry = _ensure(tmp_path)
        inodes.append((entry / "model.safetensors").stat().st_ino)

    entry = ensure_base_model(tmp_path, steps=1, batch_size=2, on_progress=other_finishes_first)
    assert [(entry / "model.safetensors").stat().st_ino] == inodes
    assert find_fault(entry) is None
    assert not list(tmp_path.glob(".building-*"))


def test_publishing_waits_for_the_lock_and_gives_up_at_its_deadline(tmp_path: Path, monkeypatch):
    entry = tmp_path / "film-base-x"
    built = tmp_path / "built"
    built.mkdir()
    (built / "file").write_text("content")
    cache._write_manifest(built)
    with (tmp_path / "film-base-x.lock").open("w") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        monkeypatch.setattr(cache, "_PUBLISH_DEADLINE_SECONDS", 0.1)
        with pytest.raises(DeadlineExceeded, match=r"film-base-x\.lock"):
            cache._publish(built, entry, discard=tmp_path / "old")
        assert not entry.exists()
        monkeypatch.setattr(cache, "_PUBLISH_DEADLINE_SECONDS", 30.0)
        release = threading.Timer(0.2, fcntl.flock, (holder, fcntl.LOCK_UN))
        release.start()
        cache._publish(built, entry, discard=tmp_path / "old")
        release.join(timeout=10)
    assert find_fault(entry) is None


def test_a_root_that_is_a_file_is_a_config_error(tmp_path: Path):
    root = tmp_path / "file"
    root.write_text("")
    with pytest.raises(ConfigError, match=r"file.*COATI_CACHE"):
        _ensure(root)


def test_where_the_cache_is(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COATI_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_root() == tmp_path / "home" / ".cache" / "coati"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_root() == tmp_path / "home" / ".cache" / "coati"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_root() == tmp_path / "xdg" / "coati"
    monkeypatch.setenv("COATI_CACHE", str(tmp_path / "chosen"))
    assert default_cache_root() == tmp_path / "chosen"
    assert ensure_base_model(steps=1, batch_size=2).parent == tmp_path / "chosen"
