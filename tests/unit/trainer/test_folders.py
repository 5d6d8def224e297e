"""Who writes a folder, on nodes that see rank 0's disk or not; three ranks are three threads. Real ones: two ranks."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from coati.errors import CheckpointError
from coati.trainer.strategies import folders
from coati.trainer.strategies.ranks import RankInfo, Ranks

PATIENCE = 60


class ThreadRanks(Ranks):
    """One of several ranks in threads of this process."""

    def __init__(self, rank, board, meeting):
        self._info = RankInfo(rank=rank, world_size=meeting.parties)
        self._board, self._meeting = board, meeting

    def all_gather(self, vector):
        self._board[self.rank] = vector
        self._meeting.wait()
        rows = torch.stack([self._board[rank] for rank in range(self.world_size)])
        self._meeting.wait()
        return rows

    def all_reduce_sum(self, tensor):
        return self.all_gather(tensor).sum(0)


@pytest.fixture
def writes(tmp_path):
    """Ask three ranks whether they write: rank 0 has disk "a", ranks 1 and 2 share disk "b"."""
    meeting, board = threading.Barrier(3, timeout=PATIENCE), {}

    def ask(disks="abb", *, only_rank0=False):
        def one(rank):
            try:
                path = tmp_path / disks[rank] / "model"
                return folders.writes_folder(path, ThreadRanks(rank, board, meeting), only_rank0=only_rank0)
            except CheckpointError as error:
                return str(error)

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(one, range(3)))

    return ask


def test_rank_0_and_one_rank_of_each_other_disk_write(writes, tmp_path):
    assert sorted(writes()) == [False, True, True]
    assert writes()[0]
    assert writes("aaa") == [True, False, False]
    assert writes("abc") == [True, True, True]
    assert not [file for disk in tmp_path.iterdir() for file in disk.iterdir()]  # nothing temporary is left


def test_only_rank_0_leaves_other_disks_alone(writes, tmp_path):
    assert writes(only_rank0=True) == [True, False, False]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_claim_is_named_and_all_ranks_hear_of_it(writes, tmp_path):
    (tmp_path / "b").write_text("a file where a folder should be")
    outcomes = writes()
    assert "another rank could not save" in outcomes[0]
    assert all(str(tmp_path / "b") in outcome for outcome in outcomes[1:])


def test_rank_0_that_cannot_write_lets_no_rank_wait(writes, monkeypatch):
    touch = Path.touch

    def full(path, *args, **kwargs):
        if path.name.endswith(".seen"):
            raise OSError("no inodes left")
        touch(path, *args, **kwargs)

    monkeypatch.setattr(Path, "touch", full)
    outcomes = writes()
    assert "no inodes left" in outcomes[0]
    assert all("another rank" in outcome for outcome in outcomes[1:])


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
