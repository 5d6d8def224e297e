"""The order in which a bounded run is trained on, whichever maker is quicker.

Admission bounds how far ahead a sample is *issued*. That bounds its age in training only if samples are also
*consumed* in the order of their rounds: otherwise a quick maker's samples overtake a slow maker's, and these get
older than the bound while they wait. So items of later rounds wait here for the rounds before them. With
`max_staleness` 0 this makes a run of several makers repeatable to the bit.
"""

from collections.abc import Sequence

from coati.experience import BufferItem


class RoundOrder:
    """Hands items on in the order of their rounds; items without a round pass at once.

    How many can wait is bounded by admission: makers stop when the rounds they may issue are out.
    """

    def __init__(self) -> None:
        self._next_round = 0
        self._waiting: dict[int, BufferItem] = {}
        self.num_out_of_turn = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, items: Sequence[BufferItem]) -> list[BufferItem]:
        """Take items in and return those whose turn it is."""
        ready = []
        for item in items:
            index = item.round_index
            if index is not None and index >= self._next_round and index not in self._waiting:
                self._waiting[index] = item
            else:
                # No round, or one that is taken: a restarted maker counts from 0 again. Nothing is ever held back
                # for a turn that has passed, and nothing is lost.
                self.num_out_of_turn += index is not None
                ready.append(item)
        while (item_in_turn := self._waiting.pop(self._next_round, None)) is not None:
            ready.append(item_in_turn)
            self._next_round += 1
        return ready

    def flush(self) -> list[BufferItem]:
        """The items that still wait, in order, when the rounds before them will not come."""
        rest = [self._waiting[index] for index in sorted(self._waiting)]
        if rest:
            self._next_round = max(self._waiting) + 1
        self._waiting.clear()
        return rest
