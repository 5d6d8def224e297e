"""The seed's way to update a maker: a start, state dicts, an end, in one call or several, without ids.

Such calls go through the same stage as everything else. They carry no sender, so there is one of them at a time: a
new start discards what an earlier one had staged.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from coati.models.lora import LayerLoRA, as_layer_lora
from coati.weights.stage import PLAIN_UPDATE, VerifiedUpdate, WeightStage


class PlainUpdates:
    """Turns plain calls into verified updates."""

    def __init__(self, stage: WeightStage, *, allow_partial: bool) -> None:
        self._stage = stage
        self._allow_partial = allow_partial
        self._is_open = False  # between a start and its end
        self._lora: dict[str, dict[str, LayerLoRA]] = {}

    def take(
        self,
        state_dicts: Mapping[str, Mapping[str, Any] | None],
        lora: Mapping[str, Mapping[str, Any] | None],
        *,
        fully_update: bool,
        chunk_start: bool | None,
        chunk_end: bool | None,
    ) -> VerifiedUpdate | None:
        """Take one call; the update when this was its last, verified as a whole.

        A call without flags outside of an update is an update of its own. After a rejection the rest of the
        update is rejected too, up to its end: half a model is a wrong model.
        """
        is_whole = not chunk_start and not chunk_end and not self._is_open
        self._is_open = bool(chunk_start or self._is_open) and not chunk_end
        if chunk_start or is_whole:
            self._stage.begin(PLAIN_UPDATE, version=None, source="a plain call")
            self._lora = {}
        try:
            for module, state_dict in state_dicts.items():
                if state_dict:
                    self._stage.add_plain(module, state_dict)
            for module, settings in lora.items():
                layers = {name: as_layer_lora(value) for name, value in (settings or {}).items()}
                self._lora.setdefault(module, {}).update(layers)
            if not (chunk_end or is_whole):
                return None
            is_partial = (self._allow_partial or any(self._lora.values())) and not fully_update
            update = self._stage.finish_plain(allow_partial=is_partial, lora=self._lora)
        except BaseException:
            self._stage.abort(PLAIN_UPDATE)
            raise
        # The sender's word: what it calls a full update is one, even if the maker holds more modules.
        return dataclasses.replace(update, is_full=update.is_full or fully_update)
