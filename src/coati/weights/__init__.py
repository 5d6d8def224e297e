"""Weights on their way from trainers to makers: sent in chunks, staged, verified, committed whole.

sender ── WeightMessage: header, chunks, manifest ──► receiver ── VerifiedUpdate ──► served models
"""

from coati.weights.message import Chunk, UpdateHeader, WeightManifest, WeightMessage
from coati.weights.receiver import WeightReceiver
from coati.weights.recipients import Recipients
from coati.weights.sender import WeightSender
from coati.weights.served import ServedModels, VerifiedUpdate
from coati.weights.transports import CardMemory

__all__ = [
    "CardMemory",
    "Chunk",
    "Recipients",
    "ServedModels",
    "UpdateHeader",
    "VerifiedUpdate",
    "WeightManifest",
    "WeightMessage",
    "WeightReceiver",
    "WeightSender",
]
