"""Receipts: which deliveries have arrived, so that a repeated one is recognised."""

from collections.abc import Sequence

from coati.experience import BufferItem


class DeliveryLog:
    """Remembers delivery ids, (sender, sequence number), and tells fresh items from repeated ones.

    Sequence numbers of a sender count up from 0 without gaps, so what has arrived is one number for each
    sender, plus the few that arrived out of order.
    """

    def __init__(self) -> None:
        self._next: dict[str, int] = {}
        self._ahead: dict[str, set[int]] = {}
        self.num_repeated = 0

    def fresh(self, items: Sequence[BufferItem]) -> list[BufferItem]:
        """The items that have not arrived before; items without a delivery id are always fresh."""
        return [item for item in items if self._is_fresh(item.delivery_id)]

    def _is_fresh(self, delivery_id: tuple[str, int] | None) -> bool:
        if delivery_id is None:
            return True
        sender, number = delivery_id
        ahead = self._ahead.setdefault(sender, set())
        expected = self._next.get(sender, 0)
        if number < expected or number in ahead:
            self.num_repeated += 1
            return False
        ahead.add(number)
        while expected in ahead:
            ahead.remove(expected)
            expected += 1
        self._next[sender] = expected
        return True
