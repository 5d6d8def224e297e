"""Weights on their way from trainers to makers: published in chunks, staged, verified, committed whole."""

from coati.weights.manifest import DEFAULT_CHUNK_MIB, UpdateHeader, WeightChunk, WeightManifest
from coati.weights.plain_updates import PlainUpdates
from coati.weights.publisher import new_header, weight_messages
from coati.weights.served import ServedModels
from coati.weights.stage import PLAIN_UPDATE, VerifiedUpdate, WeightStage

__all__ = [
    "DEFAULT_CHUNK_MIB",
    "PLAIN_UPDATE",
    "PlainUpdates",
    "ServedModels",
    "UpdateHeader",
    "VerifiedUpdate",
    "WeightChunk",
    "WeightManifest",
    "WeightStage",
    "new_header",
    "weight_messages",
]
