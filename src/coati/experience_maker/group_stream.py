"""Samples on their way through an engine, and which of them belong together."""

import dataclasses

import torch

from coati.experience_maker.base import PromptBatch
from coati.rollout import GenerateOptions, Response, RolloutEngine, RolloutRequest


@dataclasses.dataclass(eq=False)
class _Group:
    """Samples that are scored together."""

    prompts: PromptBatch  # with which it was submitted
    rows: list[int] = dataclasses.field(default_factory=list)  # of these
    missing: set[int] = dataclasses.field(default_factory=set)  # ids of samples whose response has not come
    responses: dict[int, Response] = dataclasses.field(default_factory=dict)  # by sample id


class GroupStream:
    """Feeds an engine, and puts what comes out of it into groups again."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.options = GenerateOptions()
        """With which all is generated."""
        self.num_writing = 0
        """Samples of groups that are not complete."""
        self.num_written = 0
        """Samples of complete groups."""
        self._groups: dict[int, _Group] = {}
        self._group_of: dict[int, _Group] = {}  # by the ids of samples that are being written

    def submit(
        self, prompts: PromptBatch, limits: list[int], options: GenerateOptions, *, seed: int, in_groups: bool
    ) -> None:
        """Have prompts continued, each up to its limit; one with a limit below 1 gets no response.

        What is there of the same groups is forgotten: they are made again.
        """
        assert prompts.sample_ids is not None
        ids: list[int] = prompts.sample_ids.tolist()
        numbers = ids if not in_groups or prompts.group_ids is None else prompts.group_ids.tolist()
        for number in numbers:
            if (old := self._groups.pop(number, None)) is not None:
                self._forget(old)
        for row, (one, number, limit) in enumerate(zip(ids, numbers, limits, strict=True)):
            group = self._groups.setdefault(number, _Group(prompts))
            group.rows.append(row)
            if limit > 0:
                group.missing.add(one)
                self._group_of[one] = group
        for number in dict.fromkeys(numbers):
            self._count(self._groups[number], 1)
        self.options = options
        has_room = torch.tensor(limits) > 0
        if bool(has_room.any()):
            some = prompts.select(has_room)
            assert some.sample_ids is not None
            self.engine.submit(
                RolloutRequest(
                    input_ids=some.input_ids,
                    attention_mask=some.attention_mask,
                    sample_ids=some.sample_ids,
                    seed=seed,
                    options=options,
                    max_new_tokens=torch.tensor(limits)[has_room],
                )
            )

    def advance(self, version: int) -> None:
        """Write a few tokens of each sample with weights of this version."""
        self.engine.commit(version)
        for response in self.engine.advance():
            group = self._group_of.pop(response.sample_id)
            self._count(group, -1)
            group.missing.remove(response.sample_id)
            self._count(group, 1)
            group.responses[response.sample_id] = response

    def take(self) -> tuple[PromptBatch, dict[int, Response]]:
        """All complete groups in the order in which they were submitted, and the responses by sample id."""
        rows: dict[PromptBatch, list[int]] = {}
        responses: dict[int, Response] = {}
        for group in self._groups.values():
            if not group.missing:
                rows.setdefault(group.prompts, []).extend(group.rows)
                responses |= group.responses
        self._groups = {number: group for number, group in self._groups.items() if group.missing}
        self.num_written = 0
        parts = []
        for prompts, mine in rows.items():
            is_taken = torch.zeros(len(prompts), dtype=torch.bool)
            is_taken[mine] = True
            parts.append(prompts.select(is_taken))
        return PromptBatch.joined(parts), responses

    def clear(self) -> None:
        """Forget everything."""
        for group in self._groups.values():
            self._forget(group)
        self._groups.clear()

    def _count(self, group: _Group, sign: int) -> None:
        """Add the samples of a group to what is written or being written, or take them away."""
        if group.missing:
            self.num_writing += sign * len(group.rows)
        else:
            self.num_written += sign * len(group.rows)

    def _forget(self, group: _Group) -> None:
        self._count(group, -1)
        self.engine.cancel(group.missing)
        for one in group.missing:
            del self._group_of[one]
