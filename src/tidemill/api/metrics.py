"""The server's own figures, and /metrics, which adds up all processes' files."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from tidemill.wire.messages import ErrorInfo

LATENCY_BUCKETS = [0.005 * 2**n for n in range(16)]  # 5 ms to 164 s
TPOT_BUCKETS = [0.0005 * 2**n for n in range(14)]  # 0.5 ms to 4 s


class ServerMetrics:
    """Observed when a sequence starts and ends, never per token."""

    def __init__(self) -> None:
        self._requests = Counter(
            "tidemill_requests",
            "Sequences by endpoint and outcome; error and refused once a request.",
            ["endpoint", "outcome"],
            registry=None,
        )
        self.open_requests = Gauge(
            "tidemill_open_requests",
            "HTTP requests being answered.",
            registry=None,
            multiprocess_mode="livesum",
        )
        self.ttft = Histogram(
            "tidemill_ttft_seconds",
            "Time from a request's arrival to a sequence's first text.",
            buckets=LATENCY_BUCKETS,
            registry=None,
        )
        self.tpot = Histogram(
            "tidemill_tpot_seconds",
            "Time per output token after the first, one observation a sequence.",
            buckets=TPOT_BUCKETS,
            registry=None,
        )
        self.latency = Histogram(
            "tidemill_latency_seconds",
            "Time from a request's arrival to a sequence's end.",
            buckets=LATENCY_BUCKETS,
            registry=None,
        )

    def ended(self, endpoint: str, outcome: str) -> None:
        self._requests.labels(endpoint, outcome).inc()

    def failed(self, endpoint: str, info: ErrorInfo) -> None:
        """A request ends with an error: a refusal, unless the fault is the server's own."""
        refused = info.status < 500 or info.status == 503
        self.ended(endpoint, "refused" if refused else "error")


def exposition(metrics_dir: str) -> bytes:
    """All processes' metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=metrics_dir)  # type: ignore[no-untyped-call]
    return generate_latest(registry)
