"""Makers that only have `make_experience`: whole batches, one at a time."""

import inspect
import sys
from typing import Any

import torch

from coati.experience_maker.base import AllSamplesDropped, ExperienceMaker, MakerBatch
from coati.experience_maker.naive import NaiveExperienceMaker
from coati.prompts.batch import PromptBatch


class WholeBatches:
    """Has a maker make each batch at once, when it is scored; nothing is written before."""

    is_stream = False
    num_writing = 0
    room = sys.maxsize

    def __init__(self, maker: ExperienceMaker) -> None:
        self._maker = maker
        self._waiting: tuple[PromptBatch, dict[str, Any]] | None = None

    @property
    def num_written(self) -> int:
        """Samples of the batch that was submitted."""
        return 0 if self._waiting is None else len(self._waiting[0])

    def submit(self, prompts: PromptBatch, **generate_kwargs: Any) -> None:
        """Take a batch in."""
        assert self._waiting is None
        self._waiting = prompts, generate_kwargs

    def write(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def score(self) -> MakerBatch:
        """Make the batch.

        Ids and versions that `make_experience` leaves out are filled in, if it returns one sample for each prompt.
        """
        assert self._waiting is not None
        (prompts, generate_kwargs), self._waiting = self._waiting, None
        known = {"sample_ids": prompts.sample_ids, "group_ids": prompts.group_ids, "columns": prompts.columns}
        declared = _declared_keywords(type(self._maker))
        known = {name: value for name, value in known.items() if name in declared}
        try:
            experience = self._maker.make_experience(
                prompts.input_ids, prompts.attention_mask, **known, **generate_kwargs
            )
        except AllSamplesDropped as error:
            return MakerBatch(prompts, dropped=error)
        if experience.num_samples == len(prompts):
            for name in ("sample_ids", "group_ids"):
                if getattr(experience, name) is None:
                    setattr(experience, name, getattr(prompts, name))
        if experience.policy_versions is None:
            version = self._maker.policy_version
            experience.policy_versions = torch.full_like(experience.action_log_probs, version, dtype=torch.long)
        return MakerBatch(prompts, experience)

    def finish(self, batch: MakerBatch) -> None:
        """Do nothing: `make_experience` has done all."""


def stream_of(maker: ExperienceMaker) -> NaiveExperienceMaker | WholeBatches:
    """The maker itself if it can begin samples while others are being written: if its class, or the nearest above it,
    has `submit`, and not only a `make_experience` of its own."""
    for owner in type(maker).__mro__:
        if "submit" in vars(owner):
            return maker  # type: ignore[return-value]
        if "make_experience" in vars(owner):
            break
    return WholeBatches(maker)


def _declared_keywords(maker_class: type) -> set[str]:
    """Return what `make_experience` takes by name; one that passes **kwargs on takes what the one it overrides does."""
    names: set[str] = set()
    for owner in maker_class.__mro__:
        if (method := vars(owner).get("make_experience")) is not None:
            parameters = inspect.signature(method).parameters
            names |= parameters.keys()
            if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    return names
