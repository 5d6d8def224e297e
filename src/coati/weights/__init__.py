"""Weights on their way from trainers to makers: sent in chunks, staged, verified, committed whole.

sender ── WeightMessage: header, chunks, manifest ──► receiver ── VerifiedUpdate ──► served models
"""

from coati.weights.message import MemoryProbe, UpdateHeader, VerifyUpdates, WeightManifest, WeightMessage
from coati.weights.receiver import WeightReceiver
from coati.weights.recipients import Recipients
from coati.weights.sender import DEFAULT_CHUNK_MIB, WeightSender, shared_memory_of
from coati.weights.served import ServedModels, VerifiedUpdate

__all__ = [
    "DEFAULT_CHUNK_MIB",
    "MemoryProbe",
    "Recipients",
    "ServedModels",
    "UpdateHeader",
    "VerifiedUpdate",
    "VerifyUpdates",
    "WeightManifest",
    "WeightMessage",
    "WeightReceiver",
    "WeightSender",
    "shared_memory_of",
]
