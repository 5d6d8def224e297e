import sys
from pathlib import Path

import torch

from ranks import learner, strategies

if __name__ == "__main__":
    torch.set_num_threads(1)
    for module in (learner, strategies):
        module.main(Path(sys.argv[1]) / module.__name__.rpartition(".")[2])
