"""Where each process listens. All are ipc sockets in one private run directory.

The receiver binds, senders connect: a restarted receiver binds the same path again and the
senders' sockets reconnect by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoints:
    run_dir: str

    def _ipc(self, name: str) -> str:
        return f"ipc://{self.run_dir}/{name}.sock"

    def server(self, index: int) -> str:
        return self._ipc(f"server-{index}")

    def tokenizer(self, index: int) -> str:
        return self._ipc(f"tokenizer-{index}")

    def detokenizer(self, index: int) -> str:
        return self._ipc(f"detokenizer-{index}")

    @property
    def scheduler(self) -> str:
        return self._ipc("scheduler")

    @property
    def control(self) -> str:
        """The supervisor's PULL socket for `Status`."""
        return self._ipc("control")

    @property
    def events(self) -> str:
        """The supervisor's PUB socket for `Snapshot`."""
        return self._ipc("events")

    def ring(self, rank: int) -> str:
        """Path prefix of the shared-memory ring between the scheduler and runner `rank`."""
        return f"{self.run_dir}/ring-{rank}"

    @property
    def metrics_dir(self) -> str:
        """prometheus_client's multiprocess directory."""
        return f"{self.run_dir}/metrics"
