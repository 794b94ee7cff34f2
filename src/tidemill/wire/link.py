"""How the scheduler reaches a runner: one interface, an inline and a shared-memory version."""

from __future__ import annotations

from typing import Protocol

from tidemill.wire.plan import StepPlan, StepResult


class RunnerGone(RuntimeError):
    """The runner died; every slot's device state is lost."""


class RunnerLink(Protocol):
    """FIFO of steps. Results come back in the order of their plans."""

    def send(self, plan: StepPlan) -> None:
        """Hand over a plan. Inline: executes it before returning."""

    def poll(self) -> StepResult | None:
        """The next result if there is one; never blocks. Raises RunnerGone."""

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` may have something (-1: inline)."""


class StepExecutor(Protocol):
    """Who executes plans: the model runner, or the scheduler's simulated one."""

    def execute(self, plan: StepPlan) -> StepResult: ...


class InlineLink:
    """Runs the executor in this process, synchronously: the oracle and the debugger's friend."""

    def __init__(self, executor: StepExecutor) -> None:
        self._executor = executor
        self._results: list[StepResult] = []

    def send(self, plan: StepPlan) -> None:
        self._results.append(self._executor.execute(plan))

    def poll(self) -> StepResult | None:
        return self._results.pop(0) if self._results else None

    def fileno(self) -> int:
        return -1
