"""Names of the Hugging Face hub where there is no network."""

from __future__ import annotations

import logging
import os
import socket
import sys
import urllib.request
from urllib.parse import urlsplit

from coati.config.checks import input_paths, looks_local
from coati.config.run_settings import RunSettings

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 3.0


def avoid_hub_without_network(config: RunSettings) -> None:
    """Set HF_HUB_OFFLINE if the run reads something from the hub, which cannot be reached.

    Its library tries for half a minute per file, even if the file was downloaded before. It reads the variable when it
    is imported, so call this first.
    """
    if "HF_HUB_OFFLINE" in os.environ or all(map(looks_local, input_paths(config).values())):
        return
    hub = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if hub.hostname is None or urllib.request.getproxies():  # a proxy may reach what we cannot
        return
    try:
        socket.create_connection((hub.hostname, hub.port or 443), timeout=_CONNECT_SECONDS).close()
    except OSError as error:
        logger.warning("%s cannot be reached (%s); using downloaded models and datasets only.", hub.hostname, error)
        os.environ["HF_HUB_OFFLINE"] = "1"
        if (constants := sys.modules.get("huggingface_hub.constants")) is not None:
            constants.HF_HUB_OFFLINE = True  # type: ignore[attr-defined]
