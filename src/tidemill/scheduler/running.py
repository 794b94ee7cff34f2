"""The requests that hold a slot: how they get in, and the one way out."""

from __future__ import annotations

from tidemill.scheduler.kv_cache import KVCache, Reservation
from tidemill.scheduler.requests import Request, State
from tidemill.scheduler.slots import SlotTable


class Running:
    """Slots, and the requests in them."""

    def __init__(self, slots: SlotTable, cache: KVCache) -> None:
        self.slots = slots
        self.cache = cache
        self.by_slot: dict[int, Request] = {}
        self.prefilling: list[Request] = []  # in order of rank
        self.released: list[int] = []  # slots that the runner has yet to be told of
        self.departures = 0  # while it stands still, every slot belongs to whom it belonged

    def __len__(self) -> int:
        return len(self.by_slot)

    def enter(self, request: Request, reserved: Reservation) -> int:
        """Give a waiting request a slot and its pages; it starts with a prefill."""
        slots = self.slots
        slot = slots.occupy(request.ids, reserved.pages, reserved.reused)
        slots.rid[slot] = request.rid
        slots.detokenizer[slot] = request.submit.detokenizer
        slots.logprobs[slot] = -1 if request.params.logprobs is None else request.params.logprobs
        request.slot, request.lease, request.state = slot, reserved.lease, State.RUNNING
        self.by_slot[slot] = request
        self.prefilling.append(request)
        self.prefilling.sort(key=lambda each: each.rank)
        return slot

    def leave(self, request: Request, state: State, step: int) -> None:
        """Take a request out of its slot: it ended, or was preempted. `step` is the last step
        that was planned.

        Safe at any time between two plans: steps in flight may still write the slot and its
        pages, but whoever gets these next is touched by later steps only (see pages.py).
        """
        slots, slot, lease = self.slots, request.slot, request.lease
        if lease is None:
            raise ValueError(f"request {request.rid} is not running")
        known = slots.tokens(slot)
        if request in self.prefilling:
            self.prefilling.remove(request)
        # The KV of the last known token may not have been written: nobody needs its result.
        written = min(int(slots.planned[slot]), len(known) - 1)
        self.cache.retire(lease, known[:written], slots.page_table(slot), step)
        if state is State.WAITING:
            request.ids = known.copy()
        del self.by_slot[slot]
        slots.vacate(slot)
        self.released.append(slot)
        self.departures += 1
        request.slot, request.lease, request.state = -1, None, state

    def last_in_rank(self) -> Request:
        """Whom to preempt: the youngest of the lowest priority."""
        return max(self.by_slot.values(), key=lambda request: request.rank)

    def take_released(self) -> list[int]:
        released, self.released = self.released, []
        return released
