"""Weights on their way from trainers to makers: sent in chunks, staged, verified, committed whole.

sender ── WeightMessage: header, chunks, manifest ──► receiver ── VerifiedUpdate ──► served models
"""

from coati.weights.message import Chunk, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.receiver import WeightReceiver
from coati.weights.recipients import Recipients
from coati.weights.sender import WeightSender, shared_memory_of
from coati.weights.served import ServedModels, VerifiedUpdate

__all__ = [
    "Chunk",
    "Recipients",
    "ServedModels",
    "UpdateHeader",
    "VerifiedUpdate",
    "WeightManifest",
    "WeightMessage",
    "WeightReceiver",
    "WeightSender",
    "shared_memory_of",
]
