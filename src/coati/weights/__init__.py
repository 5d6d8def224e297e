"""Weights on their way from trainers to makers: published in chunks, staged, verified, committed whole."""

from coati.weights.canary import Canary, make_canary
from coati.weights.device import DeviceSnapshots
from coati.weights.lent import LentChunk, ShareProbe, Snapshots
from coati.weights.manifest import (
    DEFAULT_CHUNK_MIB,
    UpdateHeader,
    VerifyUpdates,
    WeightChunk,
    WeightManifest,
    check_verify_updates,
)
from coati.weights.plain_updates import PlainUpdates
from coati.weights.publisher import new_header, weight_messages
from coati.weights.reader import why_not_shared
from coati.weights.served import ServedModels
from coati.weights.shared_memory import MemorySnapshots
from coati.weights.stage import PLAIN_UPDATE, VerifiedUpdate, WeightStage

__all__ = [
    "DEFAULT_CHUNK_MIB",
    "PLAIN_UPDATE",
    "Canary",
    "DeviceSnapshots",
    "LentChunk",
    "MemorySnapshots",
    "PlainUpdates",
    "ServedModels",
    "ShareProbe",
    "Snapshots",
    "UpdateHeader",
    "VerifiedUpdate",
    "VerifyUpdates",
    "WeightChunk",
    "WeightManifest",
    "WeightStage",
    "check_verify_updates",
    "make_canary",
    "new_header",
    "weight_messages",
    "why_not_shared",
]
