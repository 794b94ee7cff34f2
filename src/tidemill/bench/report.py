"""From records to figures: percentiles, spread over repetitions, a table and a JSON file."""

from __future__ import annotations

import os
import platform
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class RequestRecord:
    """One request as the client saw it. Times are seconds from the repetition's start."""

    sent: float
    prompt_tokens: int
    first: float | None = None  # first text arrived
    last: float | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first is None else (self.first - self.sent) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) * 1e3 / (self.output_tokens - 1)


@dataclass(slots=True)
class Repetition:
    """One run of a workload. `tpot_ms` overrides the records where it was measured otherwise."""

    wall_s: float
    records: list[RequestRecord]
    tpot_ms: float | None = None

    def figures(self) -> dict[str, float]:
        good = [record for record in self.records if record.error is None]
        output = sum(record.output_tokens for record in good)
        prompt = sum(record.prompt_tokens for record in good)
        made = {
            "output_tok_s": output / self.wall_s,
            "prompt_tok_s": prompt / self.wall_s,
            "total_tok_s": (output + prompt) / self.wall_s,
            "requests_s": len(good) / self.wall_s,
            "wall_s": self.wall_s,
            "errors": float(len(self.records) - len(good)),
        }
        for name in ("ttft_ms", "tpot_ms"):
            values = [v for r in good if (v := getattr(r, name)) is not None]
            if values:
                made[name] = statistics.median(values)
        if self.tpot_ms is not None:
            made["tpot_ms"] = self.tpot_ms
        return made


@dataclass(slots=True)
class Report:
    """All repetitions of one workload, and the configuration that produced them."""

    kind: str  # "offline" or "serve"
    workload: str
    description: str
    configuration: dict[str, Any]
    repetitions: list[Repetition] = field(default_factory=list)
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None

    def summary(self) -> dict[str, dict[str, float]]:
        """Per figure: median, min and max over repetitions; latencies also as percentiles over
        all requests."""
        rows = [repetition.figures() for repetition in self.repetitions]
        made: dict[str, dict[str, float]] = {}
        for name in dict.fromkeys(key for row in rows for key in row):
            values = [row[name] for row in rows if name in row]
            made[name] = {
                "median": statistics.median(values),
                "min": min(values),
                "max": max(values),
            }
        records = [r for repetition in self.repetitions for r in repetition.records if not r.error]
        for name in ("ttft_ms", "tpot_ms"):
            values = sorted(v for r in records if (v := getattr(r, name)) is not None)
            if values:
                made[name] |= {f"p{p}": percentile(values, p) for p in (50, 90, 95, 99)} | {
                    "mean": statistics.fmean(values)
                }
        goodput = self.goodput()
        if goodput is not None:
            made["goodput_requests_s"] = {"median": goodput}
        return made

    def goodput(self) -> float | None:
        """Requests a second that met every limit given (DistServe, Zhong et al. 2024)."""
        if self.slo_ttft_ms is None and self.slo_tpot_ms is None:
            return None
        rates = []
        for repetition in self.repetitions:
            met = sum(self._meets(record) for record in repetition.records)
            rates.append(met / repetition.wall_s)
        return statistics.median(rates)

    def _meets(self, record: RequestRecord) -> bool:
        if record.error is not None or record.ttft_ms is None:
            return False
        if self.slo_ttft_ms is not None and record.ttft_ms > self.slo_ttft_ms:
            return False
        tpot = record.tpot_ms
        return self.slo_tpot_ms is None or tpot is None or tpot <= self.slo_tpot_ms

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "workload": self.workload,
            "description": self.description,
            "configuration": self.configuration,
            "machine": machine(),
            "summary": self.summary(),
            "repetitions": [
                {"figures": r.figures(), "requests": [asdict(x) for x in r.records]}
                for r in self.repetitions
            ],
        }


def percentile(ordered: list[float], percent: float) -> float:
    """Nearest-rank percentile of an ascending, non-empty list."""
    rank = max(0, -(-len(ordered) * percent // 100) - 1)
    return ordered[int(rank)]


def machine() -> dict[str, Any]:
    """The processor and the features that decide a CPU figure."""
    info: dict[str, Any] = {"system": platform.platform(), "cores": os.cpu_count()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return info
    fields = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines) if v}
    flags = set(fields.get("flags", "").split())
    info["processor"] = fields.get("model name", platform.processor())
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16")
    info["features"] = [name for name in wanted if name in flags]
    return info


_UNITS = {
    "output_tok_s": "output tokens/s",
    "prompt_tok_s": "prompt tokens/s",
    "total_tok_s": "total tokens/s",
    "requests_s": "requests/s",
    "goodput_requests_s": "goodput, requests/s",
    "wall_s": "wall, s",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "errors": "errors",
}


def show(report: Report, console: Console) -> None:
    """Print the table for people."""
    table = Table(title=f"{report.kind} · {report.workload} · {report.description}")
    table.add_column("")
    for name in ("median", "min", "max", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, row in report.summary().items():
        cells = [f"{row[c]:,.2f}" if c in row else "" for c in ("median", "min", "max")]
        tail = [f"{row[c]:,.2f}" if c in row else "" for c in ("p90", "p99")]
        table.add_row(_UNITS[name], *cells, *tail)
    console.print(table)


def write_json(reports: list[Report], path: Path) -> None:
    data = msgspec.json.encode([report.to_json() for report in reports])
    path.write_bytes(msgspec.json.format(data, indent=1) + b"\n")
