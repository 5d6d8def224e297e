"""Decode steps as CUDA graphs, captured once and replayed without the host."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coati.devices import side_stream

# Maximum number of cached graphs. Slots need about ten (powers of two) for each set of sampling options.
MAX_GRAPHS = 64


def graph_size(num_slots: int) -> int:
    """Return the number of slots a graph computes for `num_slots`: a power of two or, from 24 on, 3/4 of one."""
    power = 1 << (num_slots - 1).bit_length()
    return 3 * power // 4 if power > 16 and num_slots <= 3 * power // 4 else power


class StepGraphs:
    """An LRU cache of captured graphs."""

    def __init__(self) -> None:
        # The least recently used first; each with an object that keeps tensors alive that the graph reads.
        self.graphs: dict[tuple[Any, ...], tuple[Any, object]] = {}
        self._pool: Any = None
        self._addresses: tuple[int, ...] = ()

    def invalidate_unless(self, addresses: tuple[int, ...]) -> None:
        """Drop all graphs unless the tensors that they read are still at these addresses."""
        if addresses != self._addresses:
            self._addresses = addresses
            self.graphs.clear()

    def replay(
        self, key: tuple[Any, ...], step: Callable[[], None], *, times: int, changed: Sequence[Tensor], used: object
    ) -> None:
        """Replay the graph with this key `times` times; capturing it, on first use, does not alter `changed`."""
        if key not in self.graphs:
            self.graphs[key] = self.capture(step, changed), used
        self.graphs[key] = graph, _ = self.graphs.pop(key)  # now the most recently used
        if len(self.graphs) > MAX_GRAPHS:
            del self.graphs[next(iter(self.graphs))]
        for _ in range(times):
            graph.replay()

    def capture(self, step: Callable[[], None], changed: Sequence[Tensor]) -> Any:
        """Capture the step as a CUDA graph. Effects of the warm-up are undone, or overwritten by the first replay."""
        saved = [tensor.clone() for tensor in changed]

        def restore() -> None:
            for tensor, value in zip(changed, saved, strict=True):
                tensor.copy_(value)

        stream = side_stream(changed[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                restore()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local, because other threads of the actor stage weights and allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            step()
        self._pool = self._pool or graph.pool()
        return graph
