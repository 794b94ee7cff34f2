"""The scheduler's figures for /metrics.

Under a supervisor they live in files that the server workers read (prometheus_client's
multiprocess mode); each update costs about a microsecond. Counters of a scheduler that died go
on counting in the sum, its gauges go with it.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from tidemill.scheduler.scheduler import Scheduler

STEP_BUCKETS = [0.0005 * 2**n for n in range(15)]  # 0.5 ms to 8 s
PLAN_BUCKETS = [0.00001 * 2**n for n in range(13)]  # 10 µs to 41 ms
QUEUE_BUCKETS = [0.001 * 4**n for n in range(10)]  # 1 ms to 262 s
KINDS = ("prefill", "decode", "mixed")


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    return Gauge(name, text, labels, registry=None, multiprocess_mode="livesum")


class SchedulerMetrics:
    """`update` after each turn."""

    def __init__(self) -> None:
        # registry=None: nobody asks this process, and each instance is its own.
        self._running = _gauge("tidemill_running_requests", "Requests in the batch.")
        self._waiting = _gauge("tidemill_waiting_requests", "Requests that wait to run.")
        pages = _gauge("tidemill_kv_pages", "KV pages by state, and their total.", ("state",))
        self._pages_used, self._pages_cached = pages.labels("used"), pages.labels("cached")
        self._pages_total = pages.labels("total")
        self._preemptions = Counter(
            "tidemill_preemptions", "Requests put back for lack of KV pages.", registry=None
        )
        self._prompt = Counter(
            "tidemill_prompt_tokens", "Prompt tokens of requests that started.", registry=None
        )
        self._cached = Counter(
            "tidemill_cached_tokens",
            "Those of the prompt tokens that were in the prefix cache.",
            registry=None,
        )
        self._generated = Counter("tidemill_generated_tokens", "Tokens sampled.", registry=None)
        steps = Counter("tidemill_steps", "Steps by kind.", ["kind"], registry=None)
        seconds = Histogram(
            "tidemill_step_seconds",
            "Time of a step on the device.",
            ["kind"],
            buckets=STEP_BUCKETS,
            registry=None,
        )
        self._steps = {kind: (steps.labels(kind), seconds.labels(kind)) for kind in KINDS}
        self._planning = Histogram(
            "tidemill_schedule_seconds", "Time to plan a step.", buckets=PLAN_BUCKETS, registry=None
        )
        self._queue = Histogram(
            "tidemill_queue_seconds",
            "Time from submission to the batch.",
            buckets=QUEUE_BUCKETS,
            registry=None,
        )
        self._counted = (0, 0, 0, 0)

    def update(self, scheduler: Scheduler) -> None:
        """Take over what happened since the last call."""
        for step in scheduler.take_step_times():
            count, seconds = self._steps[step.kind]
            count.inc()
            seconds.observe(step.device_seconds)
            self._planning.observe(step.planning_seconds)
        for waited in scheduler.take_queue_times():
            self._queue.observe(waited)
        stats = scheduler.stats
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._pages_used.set(stats.pages_used)
        self._pages_cached.set(stats.pages_cached)
        self._pages_total.set(stats.pages_used + stats.pages_cached + stats.pages_free)
        now = (
            stats.preemptions,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.generated_tokens,
        )
        counters = (self._preemptions, self._prompt, self._cached, self._generated)
        for counter, value, before in zip(counters, now, self._counted, strict=True):
            if value != before:
                counter.inc(value - before)
        self._counted = now
