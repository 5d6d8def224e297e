"""What a model has to itself: a config that no other model writes into, and memory that no file lies behind."""

import copy
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

Model = TypeVar("Model", bound=nn.Module)


def own_config(config: PreTrainedConfig | str | Path) -> PreTrainedConfig:
    """A config for one model alone: read from its path, or a copy of what came.

    transformers writes into the config that a model is made from (its dtype, its attention), so two models made from
    one config would be what the second one was asked to be.
    """
    if isinstance(config, str | Path):
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(str(config), trust_remote_code=False)
        return loaded
    return copy.deepcopy(config)


def own_memory(model: Model) -> Model:
    """Copy weights that were just loaded out of the file that they still are, on a machine without GPUs.

    transformers maps safetensors files into memory. A model that stays on the CPU would change while it serves if
    somebody wrote into the file, and its process would end if somebody cut it short. Where there are GPUs, models go
    to one, which is a copy, and the host may have no room for another.
    """
    if not torch.cuda.is_available():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.clone()
    return model
