"""The engine: which requests it can take, and the buffers it keeps for them."""

import logging

import torch
from torch import nn

from coati.models.actor import unwrap
from coati.rollout.engine import Rollout, RolloutRequest
from coati.rollout.native.decoder import Decoder, unsupported_reason
from coati.rollout.native.loop import SlotLoop
from coati.rollout.native.work import Work
from coati.rollout.options import GenerateOptions
from coati.rollout.reference import ReferenceEngine

logger = logging.getLogger(__name__)

DEFAULT_SLOTS = 256


class NativeEngine:
    """Writes what `ReferenceEngine` writes, from the same draws, without `generate`.

    Options of `generate` beyond sampling and lengths (penalties, stop strings, processors of the user's) go to the
    reference engine, and so do models of another shape; the log says so once for each reason.
    """

    calls_commit_point = True

    def __init__(self, model: nn.Module, *, num_slots: int = DEFAULT_SLOTS) -> None:
        self._model = model
        self._num_slots = num_slots
        self._reference = ReferenceEngine(model)
        self._model_reason = unsupported_reason(model)
        self._decoder = None if self._model_reason else Decoder(model)
        self._loop: SlotLoop | None = None
        self._reasons_said: set[str] = set()

    @torch.no_grad()
    def generate(self, request: RolloutRequest) -> Rollout:
        """Continue every prompt; the result is as wide as the longest response."""
        reason = self._model_reason or _unsupported_option(request.options)
        if self._decoder is None or reason:
            self._say(reason)
            return self._reference.generate(request)
        work = Work(request, unwrap(self._model))
        num_slots = min(self._num_slots, work.num_rows)
        sizes = {
            "num_slots": num_slots,
            "num_positions": work.num_positions,
            "num_rows": work.num_rows,
            "max_new_tokens": request.max_new_tokens,
        }
        if self._loop is None or not self._loop.fits(**sizes):
            self._loop = None  # its memory first
            self._loop = SlotLoop(self._decoder, **sizes)
        rollout = self._loop.generate(request, work, num_slots=num_slots)
        if not bool(rollout.rollout_log_probs.isfinite().all()):
            self._loop = None  # attention multiplies masked places of the cache by 0, and 0 times NaN is NaN
        return rollout

    def _say(self, reason: str) -> None:
        if reason not in self._reasons_said:
            self._reasons_said.add(reason)
            logger.warning("generation goes through transformers' generate, which is slower: %s", reason)


def _unsupported_option(options: GenerateOptions) -> str:
    names = sorted(options.extra)
    return f"the option {', '.join(names)} needs it" if names else ""
