"""
The hook specifications of a plugin.

A plugin may implement any of these hooks. If a hook raises an exception, tft logs the exception and
the job goes on. The text of a hook says so if its exceptions have another effect.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from tft.protocol.messages import OrderName, OutsideReport
from tft.spi.markers import hookspec
from tft.spi.types import (
    Advice,
    CheckResult,
    DeviceFault,
    IncidentView,
    Numbers,
    SessionView,
)


class PluginSpecs:
    """
    The specifications of a plugin's hooks. All hooks are optional.

    A result of None means that the plugin has no answer.
    """

    # ------------------------------------------------------------ the command line

    @hookspec
    def tft_options(self) -> Sequence[click.Option]:
        """
        Return options to add to the command `tft run`. Called once, when the command line is built.
        """
        raise NotImplementedError

    @hookspec
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """
        Return environment variables to add to every process of the job.

        `options` contains the options of `tft run`, by parameter name. Raise a `UsageError` to
        refuse the run. No process has been started at this point.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ hooks in a worker

    @hookspec
    def tft_opened(self, session: SessionView) -> object | None:
        """
        Return an object with any of the methods of this class whose names begin with `tft_on_` and
        that are described under "hooks in a worker".

        From now on, tft calls these methods at the moments that this class describes. If the result
        is None, the plugin causes no cost later. The hook is called on the training thread, when
        `tft.init` has succeeded.

        An exception of one of these methods is logged. A `tft.TrainingFault` also counts as a fault
        of this rank.
        """

    @hookspec
    def tft_on_adopted(self, parts: Mapping[str, Any]) -> None:
        """
        React to the user's training objects, which the script has just given to `session.adopt`.

        Called on the training thread. The objects are the user's own: observe them, but do not
        change them. Only a tool for tests may change them.
        """

    @hookspec
    def tft_on_loss(self, step: int, loss: float) -> bool | None:
        """
        Return True to refuse the update of `step` because of the value `loss`, from which a
        backward pass of this rank begins.

        Called on the training thread for each backward pass of a step, mostly before the pass.
        After a refusal no rank applies the update: all ranks see gradients that are not finite, or
        learn of the refusal in the pre-update barrier. A plugin with this method must also have
        `tft_on_window_opening`, and raise a `tft.TrainingFault` with the reason there.
        """

    @hookspec
    def tft_on_window_opening(self, step: int, numbers: Numbers) -> None:
        """
        Raise a `tft.TrainingFault` to refuse the update of `step` because of its numbers.

        Called on the training thread in every step, when all all-reduces of this rank are complete,
        and before the update window opens. The state is then that of the end of the step before.

        Every rank must come to the same result. So judge only numbers that are the same on all
        ranks, or gradients that are not finite because a rank has refused its loss. Where ranks
        hold different parts of a model, the refusal of one rank is enough. If a rank has applied an
        update that another rank refuses, it is brought back to the step before.

        After a refusal the step is computed again. If it is refused again, its batches are left out
        with `--skip-batch`; without this option the job ends.
        """

    @hookspec
    def tft_on_window_closed(self, step: int) -> None:
        """
        React to the end of the update window of `step`, in which the optimizer has changed the
        state.

        Called on the training thread in every step.
        """

    @hookspec
    def tft_on_tail_ending(self, step: int) -> None:
        """
        React to the end of the tail of `step` (the code between the update window and the end of
        the step).

        The step is about to end. Called on the training thread in every step.
        """

    @hookspec
    def tft_on_step_ended(self, step: int) -> None:
        """
        React to the end of `step`: the state of the rank is that of the end of the step.

        Called on the training thread in every step. The state does not change before
        `tft_on_state_released` has returned, unless the script changes it outside of update
        windows.
        """

    @hookspec
    def tft_on_state_released(self) -> None:
        """
        React to the fact that the state may change from now on. An update window is about to open,
        tft is about to call a function of the user after the step, or the training loop was left.

        Called on the training thread, in every step, before the state changes.
        """

    @hookspec
    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        React to an order of an incident that this rank is about to carry out.

        Called on the training thread. `step` is the present step of this rank. For a `regroup`
        order, `step` is the step to which all ranks return.
        """

    @hookspec
    def tft_device_faults(self) -> Sequence[DeviceFault]:
        """
        Return lines to add to the table of device faults, which maps error texts to faults.

        The returned lines are tried before the lines of the table. Called once, in `tft.init`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_check(self, session: SessionView, name: str) -> CheckResult | None:
        """
        Run the check called `name` while the job is paused.

        Called on the training thread, on all ranks at the same time. Return None if this plugin has
        no check of that name. tft does not guard this hook: after an exception, the check has no
        result on this rank.
        """

    # ------------------------------------------------------------ hooks in an agent

    @hookspec
    def tft_progressed(self, run_dir: Path, node: int, step: int) -> None:
        """
        React to the completion of `step` by the first rank of this node.

        Called in the agent's event loop; must not block.
        """

    # ------------------------------------------------------------ hooks in the controller

    @hookspec
    def tft_on_leader(self, report: Callable[[OutsideReport], None]) -> None:
        """
        React to the fact that this controller is the leader of the job from now on.

        Called in the controller's event loop; must not block. An external scheduler keeps `report`,
        to send reports to the controller later. `report` may be called from any thread, at any
        time. Its argument is a `Noticed` (a fault seen from outside), a `PauseRequested` or a
        `StopRequested`.
        """

    @hookspec
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        React to an event that matters to an operator. `facts` has the details of the event.

        Events are `fault`, `stopped`, `strategy_chosen`, `incident_closed`, `job_ends` and all
        other entries of the controller's log. Called in the controller's event loop; must not
        block.
        """

    @hookspec
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Return advice on the strategy to follow in an incident, after all ranks have stopped.

        Called on a separate thread. The controller waits at most 30 s for the advice, unless the
        plugin asks for more time. Return None to give no advice.
        """

    # ------------------------------------------------------------ hooks for the report

    @hookspec(firstresult=True)
    def tft_fault_moment(
        self, run_dir: Path, kind: str, rank: int | None, seen: float
    ) -> float | None:
        """
        Return the time when a fault really happened (CLOCK_MONOTONIC, in seconds).

        `seen` is the time of the first evidence of the fault. Return None if this plugin does not
        know the time.
        """
