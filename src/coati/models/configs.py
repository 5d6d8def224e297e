"""The transformers config that a new model is made from."""

import copy
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig


def own_config(config: PreTrainedConfig | str | Path) -> PreTrainedConfig:
    """A config for one model alone: read from its path, or a copy of what came.

    transformers writes into the config that a model is made from (its dtype, its attention), so two models made from
    one config would be what the second one was asked to be.
    """
    if isinstance(config, str | Path):
        loaded: PreTrainedConfig = AutoConfig.from_pretrained(str(config))
        return loaded
    return copy.deepcopy(config)
