"""ZeroMQ as Tidemill uses it: the receiver binds PULL, every sender connects PUSH.

A receiver that restarts binds the same ipc path again (libzmq unlinks the stale file) and the
senders' sockets reconnect by themselves; what they sent meanwhile waits in their queues. What
had already reached the dead process is lost, which is why requests can be resumed.

Sending never blocks: a queue holds `QUEUE_LIMIT` messages, far more than admission limits allow
for, and a full one means that the peer hangs. That raises `PeerStuck`; nothing is dropped in
silence. One thread uses a socket.
"""

from __future__ import annotations

import zmq

from tidemill.wire import messages
from tidemill.wire.messages import AnyMessage, Message

QUEUE_LIMIT = 100_000  # messages
BATCH = 1024  # messages taken at once, so that a loop gets to its other work
RECONNECT_MS = 10
LINGER_MS = 1000  # for senders only: a process's last words are delivered


class PeerStuck(RuntimeError):
    """The receiver has not read for so long that its queue is full."""


class Sender:
    """One endpoint to send to, alive or not."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.endpoint = endpoint
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(QUEUE_LIMIT)
        self._socket.linger = LINGER_MS
        self._socket.reconnect_ivl = RECONNECT_MS
        self._socket.connect(endpoint)

    def send(self, message: Message) -> None:
        """Queue a message. Returns at once; raises `PeerStuck`."""
        try:
            self._socket.send(messages.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise PeerStuck(f"{self.endpoint} does not read: {QUEUE_LIMIT} messages wait") from None

    def close(self) -> None:
        """Close after at most a second in which queued messages may still leave."""
        self._socket.close()


class Publisher:
    """Where every subscriber hears the same. The owner sees who subscribes and can tell a late
    one at once, so nothing need be repeated meanwhile."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.socket = context.socket(zmq.XPUB)  # for pollers: readable when someone subscribed
        self.socket.set_hwm(QUEUE_LIMIT)
        self.socket.linger = 0
        self.socket.xpub_verbose = 1  # report the second subscriber too
        self.socket.bind(endpoint)

    def send(self, message: Message) -> None:
        """Tell all present subscribers. Returns at once."""
        self.socket.send(messages.encode(message))

    def has_new_subscribers(self) -> bool:
        """Whether somebody subscribed since the last call."""
        seen = False
        try:
            while True:
                seen |= self.socket.recv(zmq.NOBLOCK)[0] == 1  # 0: somebody left
        except zmq.Again:
            return seen

    def close(self) -> None:
        self.socket.close()


class Receiver:
    """One endpoint to receive from: `bind` for a process's own inbox, `subscribe` for the
    supervisor's snapshots."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket  # for pollers

    @classmethod
    def bind(cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Receiver:
        socket = context.socket(zmq.PULL)
        socket.set_hwm(QUEUE_LIMIT)
        socket.linger = 0
        socket.bind(endpoint)
        return cls(socket)

    @classmethod
    def subscribe(cls, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> Receiver:
        socket = context.socket(zmq.SUB)
        socket.set_hwm(QUEUE_LIMIT)
        socket.linger = 0
        socket.reconnect_ivl = RECONNECT_MS
        socket.subscribe(b"")
        socket.connect(endpoint)
        return cls(socket)

    def drain(self) -> list[AnyMessage]:
        """All messages that are there (at most `BATCH`), perhaps none. Never blocks."""
        batch: list[AnyMessage] = []
        try:
            while len(batch) < BATCH:
                batch.append(messages.decode(self.socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            pass
        return batch

    def receive(self, timeout_s: float | None = None) -> list[AnyMessage]:
        """Wait for a message, then `drain`. Empty only after `timeout_s`."""
        batch = self.drain()
        if not batch and self.socket.poll(None if timeout_s is None else int(timeout_s * 1000)):
            batch = self.drain()
        return batch

    async def receive_async(self) -> list[AnyMessage]:
        """`receive` for asyncio (and uvloop). Cancelling it loses no message.

        libzmq's descriptor becomes readable on a change and stays so until the socket is used
        again; draining to the end before each wait therefore misses nothing.
        """
        import asyncio  # here: most processes have no event loop and do without its memory

        loop = asyncio.get_running_loop()
        descriptor = self.socket.fileno()
        while not (batch := self.drain()):
            readable = asyncio.Event()
            loop.add_reader(descriptor, readable.set)
            try:
                await readable.wait()
            finally:
                loop.remove_reader(descriptor)
        return batch

    def close(self) -> None:
        self.socket.close()
