"""Figures are what their names say."""

import io
import json

import pytest
from rich.console import Console

from tidemill.bench.report import Repetition, Report, RequestRecord, percentile, show, write_json


def record(sent=0.0, first=1.0, last=2.0, output=11, error=None):
    return RequestRecord(sent, 100, first, last, output, error=error)


def test_latencies_of_one_request():
    one = record(sent=0.5, first=1.0, last=2.0, output=11)
    assert one.ttft_ms == pytest.approx(500)
    assert one.tpot_ms == pytest.approx(100)  # ten tokens after the first in one second
    assert record(output=1).tpot_ms is None


def test_throughput_leaves_failed_requests_out():
    figures = Repetition(2.0, [record(), record(), record(error="500")]).figures()
    assert figures["output_tok_s"] == 11
    assert figures["prompt_tok_s"] == 100
    assert figures["total_tok_s"] == 111
    assert figures["errors"] == 1


def test_summary_spreads_over_repetitions_and_requests():
    report = Report("serve", "mixed", "", {})
    report.repetitions = [Repetition(wall, [record()]) for wall in (1.0, 2.0, 4.0)]
    summary = report.summary()
    assert summary["wall_s"] == {"median": 2.0, "min": 1.0, "max": 4.0}
    assert summary["ttft_ms"]["p99"] == pytest.approx(1000)


def test_goodput_counts_requests_within_every_limit():
    fast, slow = record(first=0.1, last=0.2), record(first=3.0, last=3.1)
    report = Report("serve", "mixed", "", {}, [Repetition(2.0, [fast, slow])])
    assert report.goodput() is None
    report.slo_ttft_ms = 1000
    assert report.goodput() == pytest.approx(0.5)
    report.slo_tpot_ms = 1.0  # ten milliseconds a token in both
    assert report.goodput() == 0


def test_percentile_is_nearest_rank():
    values = [float(v) for v in range(1, 101)]
    assert [percentile(values, p) for p in (50, 90, 99, 100)] == [50, 90, 99, 100]
    assert percentile([7.0], 99) == 7


def test_outputs_for_people_and_programs(tmp_path):
    report = Report("offline", "mixed", "d", {"model": "m"}, [Repetition(1.0, [record()])])
    text = io.StringIO()
    show(report, Console(file=text, width=120))
    assert "output tokens/s" in text.getvalue()
    write_json([report], tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())[0]
    assert data["configuration"] == {"model": "m"}
    assert data["summary"]["output_tok_s"]["median"] == 11
    assert data["repetitions"][0]["requests"][0]["prompt_tokens"] == 100
