"""Run the two ranks as forks of this process, which imports everything once; print the log of each that fails."""

import multiprocessing
import os
import sys
from multiprocessing.connection import wait
from pathlib import Path

import torch

from ranks import learner, strategies


def run_rank(rank, log, folder):
    for stream in (1, 2):
        os.dup2(log.fileno(), stream)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    for module in (learner, strategies):
        module.main(folder / module.__name__.rpartition(".")[2])


def main(folder):
    logs = [(folder / f"rank{rank}.log").open("w+") for rank in range(2)]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=run_rank, args=(rank, log, folder)) for rank, log in enumerate(logs)]
    for process in ranks:
        process.start()
    # Not for both if one fails: the other only reports that it lost its connection.
    while not any(process.exitcode for process in ranks) and (alive := [one for one in ranks if one.exitcode is None]):
        wait([process.sentinel for process in alive])
    codes = [process.exitcode for process in ranks]
    for rank, log in enumerate(logs):
        if codes[rank]:
            log.seek(0)
            print(f"rank {rank}, of {codes} (None: still running): {log.read()[-3000:]}")
    for process in ranks:
        process.kill()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
