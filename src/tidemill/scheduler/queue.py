"""Requests that wait: priority first, then arrival."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from tidemill.scheduler.requests import Request, State


class WaitingQueue:
    """A heap. A request that ends while it waits stays in the heap until it surfaces.

    A preempted request comes back with its old arrival, ahead of all who came later.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[Request]:
        """In the order in which they would run."""
        return (request for _, request in sorted(self._heap) if request.state is State.WAITING)

    def push(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._heap, (request.rank, request))
        self._waiting += 1

    def peek(self) -> Request | None:
        """The next to run; it stays in the queue."""
        while self._heap and self._heap[0][1].state is State.ENDED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> None:
        """Take out what `peek` returned."""
        heapq.heappop(self._heap)
        self._waiting -= 1

    def end(self, request: Request) -> None:
        """A waiting request will not run."""
        request.state = State.ENDED
        self._waiting -= 1
