"""What crosses from the driver's environment into a worker's: five names, and nothing else."""

import os
from collections.abc import Mapping

from coati.errors import ConfigError

ENV_INFO_KEYS = ("local_rank", "rank", "world_size", "master_addr", "master_port")


def apply_env_info(env_info: Mapping[str, str | int] | None) -> None:
    """Set LOCAL_RANK, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed from `env_info`."""
    for key, value in (env_info or {}).items():
        if key not in ENV_INFO_KEYS:
            raise ConfigError(
                f"env_info may hold {', '.join(ENV_INFO_KEYS)}, got {key!r}. Other variables do not travel to workers; "
                "use Ray's runtime_env for them."
            )
        os.environ[key.upper()] = str(value)
