"""Sockets: order, no loss to a late or restarted receiver, no blocking on one that hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tidemill.wire import sockets
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import Abort, Snapshot, Status
from tidemill.wire.sockets import BATCH, PeerStuck, Publisher, Receiver, Sender
from tidemill.wire.status import StatusReporter

LIMIT_S = 20.0


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/inbox.sock"


def receive(receiver: Receiver, count: int) -> list[int]:
    """The rids of the next `count` messages."""
    got: list[int] = []
    while len(got) < count:
        batch = receiver.receive(LIMIT_S)
        assert batch, f"{len(got)} of {count} messages came"
        got += [m.rid for m in batch if isinstance(m, Abort)]
    return got


def test_what_is_sent_before_the_receiver_exists_arrives_in_order(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    sender = Sender(context, endpoint)
    count = 3 * BATCH
    for rid in range(count):
        sender.send(Abort(rid=rid))
    receiver = Receiver.bind(context, endpoint)
    assert receive(receiver, count) == list(range(count))
    assert receiver.drain() == []


def test_receive_returns_empty_after_the_timeout(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    assert Receiver.bind(context, endpoint).receive(0.01) == []


def test_a_killed_receiver_is_replaced_at_the_same_path(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str
) -> None:
    code = (
        "import sys, zmq; from tidemill.wire.sockets import Receiver;"
        "r = Receiver.bind(zmq.Context(), sys.argv[1]);"
        "print(r.receive()[0].rid, flush=True); r.receive()"
    )
    first = subprocess.Popen([sys.executable, "-c", code, endpoint], stdout=subprocess.PIPE)
    sender = Sender(context, endpoint)
    sender.send(Abort(rid=1))
    assert first.stdout is not None
    assert first.stdout.readline() == b"1\n"
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    second = Receiver.bind(context, endpoint)
    # The sender may still take the dead connection for alive: such a message is lost, as one
    # that was being read would be.
    for rid in range(2, 2000):
        sender.send(Abort(rid=rid))
        if second.receive(0.02):
            break
    else:
        pytest.fail("nothing reached the second receiver")
    sender.send(Abort(rid=5000))
    assert receive(second, 1)[-1] == 5000


def test_a_full_queue_raises_and_never_blocks(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "QUEUE_LIMIT", 10)
    sender = Sender(context, endpoint)
    for rid in range(10):
        sender.send(Abort(rid=rid))
    with pytest.raises(PeerStuck, match=r"inbox\.sock"):
        sender.send(Abort(rid=10))
    # What was accepted before is not lost.
    assert receive(Receiver.bind(context, endpoint), 10) == list(range(10))


@pytest.mark.parametrize("loop_name", ["asyncio", "uvloop"])
def test_asyncio_receives_everything_and_survives_cancelling(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, loop_name: str
) -> None:
    loop_factory = pytest.importorskip(loop_name).new_event_loop
    receiver = Receiver.bind(context, endpoint)
    count = 5000

    def send() -> None:
        sender = Sender(context, endpoint)
        for rid in range(count):
            sender.send(Abort(rid=rid))
        sender.close()

    async def collect() -> list[int]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receiver.receive_async(), 0.01)
        thread = threading.Thread(target=send)
        thread.start()
        got: list[int] = []
        while len(got) < count:
            batch = await asyncio.wait_for(receiver.receive_async(), LIMIT_S)
            got += [m.rid for m in batch if isinstance(m, Abort)]
        thread.join()
        return got

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        assert runner.run(collect()) == list(range(count))


def test_status_reports_arrive_even_if_the_process_ends_right_after(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    code = (
        "import sys, zmq; from tidemill.wire.status import StatusReporter\n"
        "with zmq.Context() as context:\n"
        "    reporter = StatusReporter(context, sys.argv[1], 'runner-0')\n"
        "    reporter.fatal('no room')\n"
        "    reporter.close()\n"
    )
    receiver = Receiver.bind(context, Endpoints(str(tmp_path)).control)
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    (status,) = receiver.receive(LIMIT_S)
    process.wait(LIMIT_S)
    assert isinstance(status, Status)
    assert (status.component, status.state, status.fatal) == ("runner-0", "dead", "no room")
    assert status.pid == process.pid


def test_progress_is_reported_at_a_bounded_rate_but_its_end_always(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    receiver = Receiver.bind(context, Endpoints(str(tmp_path)).control)
    reporter = StatusReporter(context, str(tmp_path), "runner-0")
    for step in range(1001):
        reporter.starting("Loading", step / 1000)
    reporter.ready()
    got: list[Status] = []
    while not got or got[-1].state != "ready":
        got += [m for m in receiver.receive(LIMIT_S) if isinstance(m, Status)]
    assert got[0].progress == 0.0
    assert got[-2].progress == 1.0
    assert len(got) < 500


def test_publisher_notices_every_subscriber_and_reaches_them_all(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    endpoint = Endpoints(str(tmp_path)).events
    publisher = Publisher(context, endpoint)
    readers = []
    for state in ("starting", "ready"):
        readers.append(Receiver.subscribe(context, endpoint))
        assert publisher.socket.poll(LIMIT_S * 1000)
        assert publisher.has_new_subscribers()
        assert not publisher.has_new_subscribers()
        publisher.send(Snapshot(state=state, components={}))
        for reader in readers:
            (snapshot,) = reader.receive(LIMIT_S)
            assert isinstance(snapshot, Snapshot)
            assert snapshot.state == state
