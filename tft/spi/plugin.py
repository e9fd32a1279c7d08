"""
The hook specifications of a plugin.

A plugin may implement any of these hooks. tft guards them: an exception of a plugin is logged, and
the job goes on. The hooks that differ say so.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tft.protocol.messages import OrderName, OutsideReport
from tft.spi.markers import hookspec
from tft.spi.types import Advice, CheckResult, DeviceFault, IncidentView, SessionView


class PluginSpecs:
    """
    The hooks of a plugin. All of them are optional. A result of None means "no answer".
    """

    # ------------------------------------------------------------ the command line

    @hookspec
    def tft_options(self) -> Sequence[click.Option]:
        """
        Return options to add to `tft run`. Called once, when the command line is built.
        """
        raise NotImplementedError

    @hookspec
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """
        Return variables to add to the environment of every process of the job.

        `options` are the options of `tft run`, by parameter name. Raise a `UsageError` to refuse
        the run; no process has been started at this point.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ in a worker

    @hookspec
    def tft_opened(self, session: SessionView) -> object | None:
        """
        Return an object with any of the `tft_on_…` hooks of this section, which are called from now
        on. None costs nothing later.

        Called on the training thread, when `tft.init` has succeeded. An exception of such a hook
        with an attribute `tft_fault_kind` is not only logged: it counts as a fault at this rank.
        """

    @hookspec
    def tft_on_adopted(self, parts: Mapping[str, Any]) -> None:
        """
        Take note that the user has handed over these objects (training thread).

        They are the user's own objects: watch them, but do not change them. Only a tool for tests
        may disturb them.
        """

    @hookspec
    def tft_on_window_closed(self, step: int) -> None:
        """
        Take note that the update window of `step` has closed (training thread, every step).
        """

    @hookspec
    def tft_on_tail_ending(self, step: int) -> None:
        """
        Take note that the tail of `step` is done and the step is about to end (training thread,
        every step).
        """

    @hookspec
    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        Take note that an order of an incident is about to be carried out (training thread).

        `step` is the present step of this rank; for `regroup`, the step to which all ranks return.
        """

    @hookspec
    def tft_device_faults(self) -> Sequence[DeviceFault]:
        """
        Return lines for the table of device faults. They are tried before the table's own lines.

        Called once, in `tft.init`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_check(self, session: SessionView, name: str) -> CheckResult | None:
        """
        Run the check called `name` while the job is paused (training thread; all ranks at once).

        Return None if this plugin has no check of that name. An exception is not guarded here: the
        check then has no result on this rank.
        """

    # ------------------------------------------------------------ in an agent

    @hookspec
    def tft_progressed(self, run_dir: Path, node: int, step: int) -> None:
        """
        Take note that a rank of this node is the first that has completed `step`.

        Called in the agent's event loop; must not block.
        """

    # ------------------------------------------------------------ in the controller

    @hookspec
    def tft_on_leader(self, report: Callable[[OutsideReport], None]) -> None:
        """
        Take note that this controller is the leader from now on.

        Called in the controller's event loop; must not block. `report` may be called from any
        thread, at any time: with a `Noticed` for a fault that was seen from outside, a
        `PauseRequested` or a `StopRequested`. An external scheduler uses it to report by itself.
        """

    @hookspec
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Take note of an event that matters to an operator, with its facts.

        Events are `fault`, `stopped`, `strategy_chosen`, `incident_closed`, `job_ends` and all
        other entries of the controller's log. Called in the controller's event loop; must not
        block.
        """

    @hookspec
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Advise which strategy to follow in an incident. All ranks have stopped.

        Called on a thread of its own. The controller waits at most 30 s for the advice, unless the
        plugin asks for more time. None: no advice.
        """

    # ------------------------------------------------------------ in the report

    @hookspec(firstresult=True)
    def tft_fault_moment(
        self, run_dir: Path, kind: str, rank: int | None, seen: float
    ) -> float | None:
        """
        Return when a fault really happened (CLOCK_MONOTONIC, seconds); None if this plugin does not
        know.

        `seen` is the time of the first evidence of the fault.
        """
