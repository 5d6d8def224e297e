"""Copies of a saved folder for nodes that do not see it; three ranks are three threads. Real ones: tests/ray."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coati.errors import CheckpointError
from coati.trainer.strategies import folders

PATIENCE = 60
MARKERS = {"model.safetensors"}


class Ranks:
    """The calls of torch.distributed that `folders` makes, between threads; a rank that leaves breaks the others."""

    def __init__(self, world_size):
        self._meeting = threading.Barrier(world_size, timeout=PATIENCE)
        self._threads = threading.local()
        self._board = {}

    def run(self, work):
        """What `work(rank)` returned or raised, by rank."""

        def one(rank):
            self._threads.rank = rank
            try:
                return work(rank)
            except CheckpointError as error:
                return error

        ranks = range(self._meeting.parties)
        with ThreadPoolExecutor(len(ranks)) as pool:
            return list(pool.map(one, ranks))

    def _exchange(self, value):
        self._board[self._threads.rank] = value
        self._meeting.wait()
        seen = [self._board[rank] for rank in range(self._meeting.parties)]
        self._meeting.wait()
        return seen

    def barrier(self):
        self._exchange(None)

    def broadcast_object_list(self, objects, src, device):
        objects[:] = self._exchange(list(objects))[src]

    def all_reduce(self, tensor):
        tensor.copy_(sum(self._exchange(tensor.clone())))

    def broadcast(self, tensor, src):
        tensor.copy_(self._exchange(tensor.clone())[src])


@pytest.fixture
def copy(monkeypatch, tmp_path):
    """Rank 0 has a folder on its own disk, "a"; ranks 1 and 2 share disk "b"."""
    ranks = Ranks(3)
    monkeypatch.setattr(folders, "dist", ranks)
    (tmp_path / "a" / "model").mkdir(parents=True)
    (tmp_path / "a" / "model" / "model.safetensors").write_bytes(b"weights")
    options = {"device": torch.device("cpu"), "markers": MARKERS}
    paths = [tmp_path / disk / "model" for disk in "abb"]
    return lambda: ranks.run(lambda rank: folders.copy_to_other_nodes(paths[rank], rank=rank, **options))


def test_one_rank_of_a_foreign_node_writes_the_copy(copy, tmp_path, monkeypatch):
    written = []
    plain = folders.replace_folder
    monkeypatch.setattr(
        folders, "replace_folder", lambda path, *rest, **kw: written.append(path) or plain(path, *rest, **kw)
    )
    assert copy() == [None, None, None]
    assert written == [tmp_path / "b" / "model"]
    assert (tmp_path / "b" / "model" / "model.safetensors").read_bytes() == b"weights"
    for disk in "ab":
        assert [entry.name for entry in (tmp_path / disk).iterdir()] == ["model"]


def test_a_node_that_may_not_write_does_not_hold_up_the_others(copy, tmp_path):
    (tmp_path / "b" / "model").mkdir(parents=True)
    (tmp_path / "b" / "model" / "thesis.txt").write_text("years of work")
    outcomes = copy()
    assert outcomes[0] is None
    refused = [outcome for outcome in outcomes if outcome is not None]
    assert len(refused) == 1
    assert "not something coati saved" in str(refused[0])
    assert (tmp_path / "b" / "model" / "thesis.txt").read_text() == "years of work"


def test_a_disk_that_takes_no_claim_is_named(copy, tmp_path):
    (tmp_path / "b").write_text("a file where a folder should be")
    outcomes = copy()
    assert outcomes[0] is None
    assert all("could not write" in str(outcome) and str(tmp_path / "b") in str(outcome) for outcome in outcomes[1:])


def test_rank_0_that_cannot_say_where_it_writes_lets_nobody_wait(copy, tmp_path, monkeypatch):
    touch = Path.touch

    def full(path, *args, **kwargs):
        if path.name.endswith(".seen"):
            raise OSError("no inodes left")
        touch(path, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", full)
    outcomes = copy()
    assert "could not write beside" in str(outcomes[0])
    assert "no inodes left" in str(outcomes[0])
    assert outcomes[1:] == [None, None]  # they hear of it with the answer to the whole save
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_a_tokenizer_is_added_whole_or_not_at_all(tmp_path, fails, monkeypatch):
    moved, replace = [], folders.os.replace
    monkeypatch.setattr(folders.os, "replace", lambda old, new: moved.append(new.name) or replace(old, new))

    def save(folder):
        for name in ("vocab.json", "tokenizer_config.json", "tokenizer.json"):
            (folder / name).write_text("{}")
            if fails and name == "tokenizer_config.json":
                raise Exception("No space left on device")  # as the tokenizers library does

    with pytest.raises(CheckpointError, match="No space left") if fails else contextlib.nullcontext():
        folders.add_tokenizer(tmp_path, save)
    assert {file.name for file in tmp_path.iterdir()} == set(moved)
    assert len(moved) == (0 if fails else 3)
    assert moved[-1:] == ([] if fails else ["tokenizer_config.json"])
