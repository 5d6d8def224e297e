"""What coati sends from the driver's environment into a worker's: five names, and nothing else.

A worker's other variables come from the Ray node it runs on. On a cluster that is the environment in which
`ray start` ran, and nothing of the driver's. A private local Ray is started by the driver and inherits what
the driver had at that moment; what is set later stays in the driver.
"""

import os
from collections.abc import Mapping

from coati.errors import ConfigError

ENV_INFO_KEYS = ("local_rank", "rank", "world_size", "master_addr", "master_port")


def apply_env_info(env_info: Mapping[str, str | int] | None) -> None:
    """Set LOCAL_RANK, RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for torch.distributed from `env_info`."""
    env_info = env_info or {}
    if unknown := [key for key in env_info if key not in ENV_INFO_KEYS]:
        raise ConfigError(
            f"env_info may hold {', '.join(ENV_INFO_KEYS)}, got {', '.join(map(repr, unknown))}. Other "
            "variables do not travel to workers; use Ray's runtime_env for them."
        )
    for key, value in env_info.items():
        os.environ[key.upper()] = str(value)
