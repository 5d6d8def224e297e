"""The native engine: generation for decoders of the Llama shape, without transformers' `generate`.

Slots of a preallocated key-value cache, and the model's own forward pass, one token at a time.
"""

import logging

import torch
from torch import nn

from coati.config.generate import native_engine_problem
from coati.models.actor import unwrap
from coati.models.packing import base_of
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.decoder import Decoder
from coati.rollout.native.loop import Sizes, SlotLoop
from coati.rollout.native.slots import PromptQueue
from coati.rollout.reference import ReferenceEngine

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 256


class NativeEngine:
    """Writes what `ReferenceEngine` writes, from the same draws, without `generate`.

    Models of another shape, and options that only `generate` knows, go to the reference engine; the log says so once
    for each reason.
    """

    def __init__(self, model: nn.Module, *, num_slots: int = DEFAULT_SLOTS) -> None:
        self._model = model
        self._num_slots = num_slots
        self._reference = ReferenceEngine(model)
        base = base_of(unwrap(model))
        config = base.config.to_dict() if hasattr(base, "config") else {}
        self._model_config = {**config, "architectures": [type(base).__name__]}
        self._decoder: Decoder | None = None
        self._loop: SlotLoop | None = None
        self._reasons_logged: set[str] = set()

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt; the result is as wide as the longest response."""
        if reason := native_engine_problem(self._model_config, request.options):
            if reason not in self._reasons_logged:
                self._reasons_logged.add(reason)
                logger.warning("generating with the reference engine, which is slower: %s", reason)
            return self._reference.generate(request)
        self._decoder = self._decoder or Decoder(self._model)
        queue = PromptQueue(request, unwrap(self._model))
        num_slots = min(self._num_slots, queue.num_rows)
        sizes = Sizes(num_slots, queue.num_positions, queue.num_rows, queue.max_new_tokens)
        if self._loop is None or not self._loop.fits(sizes):
            self._loop = None  # its memory first
            self._loop = SlotLoop(self._decoder, sizes, is_captured=self._decoder.weight.is_cuda)
        rollout = self._loop.generate(request, queue, num_slots=num_slots)
        if not bool(rollout.rollout_log_probs.isfinite().all()):
            self._loop = None  # attention multiplies masked places of the cache by 0, and 0 times NaN is NaN
        return rollout
