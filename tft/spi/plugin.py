"""
The hook specifications of a plugin.

A plugin may implement any of these hooks. Unless the text of a hook says otherwise, an exception in
the hook is logged, and the job continues.
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
    RankBeat,
    Remark,
    SessionView,
)


class PluginSpecs:
    """
    The specifications of a plugin's hooks. All hooks are optional.

    If a hook returns None, tft continues as if the plugin did not have the hook.
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

        `options` contains the values of the options of `tft run`, by parameter name. The hook is
        called before any process is started. Raise a `UsageError` to refuse the run.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ hooks in a worker

    @hookspec
    def tft_opened(self, session: SessionView) -> object | None:
        """
        Return an observer of this rank, or None if the plugin does not observe this rank.

        An observer is an object that may have any of the methods below, from `tft_on_adopted` to
        `tft_on_order`. tft calls each method at the moment that its docstring describes. The hook
        `tft_opened` itself is called on the training thread, when `tft.init` has succeeded.

        If a method of the observer raises a `tft.TrainingFault`, the exception counts as a fault of
        this rank. Any other exception is logged, and training continues.
        """

    @hookspec
    def tft_on_adopted(self, parts: Mapping[str, Any]) -> None:
        """
        React to the user's training objects, which the script has just given to `session.adopt`.

        Called on the training thread. `parts` maps the argument names of `session.adopt` to the
        user's own objects. Do not change these objects, unless the plugin is a tool for tests.
        """

    @hookspec
    def tft_on_loss(self, step: int, loss: float) -> bool | None:
        """
        Return True to refuse the update of `step` because of the value `loss`, from which a
        backward pass of this rank begins.

        Called on the training thread for each backward pass of a step, mostly before the pass. If
        the result is True, no rank applies the update. The other ranks learn of the refusal from
        gradients that are not finite, or from the pre-update barrier. A plugin with this method
        must also have the method `tft_on_window_opening`, which raises a `tft.TrainingFault` with
        the reason.
        """

    @hookspec
    def tft_on_window_opening(self, step: int, numbers: Numbers) -> None:
        """
        Raise a `tft.TrainingFault` to refuse the update of `step` because of its losses or gradient
        norms, which `numbers` contains.

        Called on the training thread in every step, when all all-reduces of this rank are complete,
        and before the update window opens. The training state is then still the state at the end of
        the step before.

        All ranks that hold the same parameters must decide alike. So decide by numbers that are
        equal on these ranks, such as the norm of the reduced gradients. This norm is not finite if
        some rank has refused its loss (`tft_on_loss`). If one rank applies an update that another
        rank refuses, the first rank is brought back to the step before.

        After a refusal the step is computed again. If its update is refused again, the job either
        leaves out the batches of the step (option `--skip-batch`) or ends.
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

        Called on the training thread in every step, just before the step ends.
        """

    @hookspec
    def tft_on_step_ended(self, step: int) -> None:
        """
        React to the end of `step`. The plugin may now read the state of the rank.

        Called on the training thread in every step. The state does not change until
        `tft_on_state_released` has returned, unless the script changes the state outside of update
        windows.
        """

    @hookspec
    def tft_on_state_released(self) -> None:
        """
        Stop reading the state of the rank, because it may change when this method has returned.

        Called on the training thread in every step, before the update window opens. Also called
        before tft calls a function of the user after a step, and when the training loop was left.
        """

    @hookspec
    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        React to an order of the controller that this rank is about to carry out in an incident.
        Incident 0 is the start of the job.

        Called on the training thread. `step` is the step that this rank was computing. For a
        `regroup` order, `step` is the first step that all ranks will compute with the new process
        groups. It is 0 if the ranks must first find a checkpoint of the user's program. If another
        step is chosen later in the incident, another `regroup` order follows.
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
        no check of that name. If the hook raises an exception, the check has no result on this
        rank.
        """

    # ------------------------------------------------------------ hooks in an agent

    @hookspec
    def tft_progressed(self, run_dir: Path, node: int, step: int) -> None:
        """
        React to progress on this node: some rank of the node has completed `step`, which no rank of
        the node had completed before.

        Called in the agent's event loop, so it must not block. The agent looks at the progress from
        time to time. If several steps were completed since it last looked, the hook is called only
        for the last of these steps.
        """

    # ------------------------------------------------------------ hooks in the controller

    @hookspec
    def tft_on_leader(self, report: Callable[[OutsideReport], None]) -> None:
        """
        React to the fact that this controller leads the job from now on.

        Called in the controller's event loop, so it must not block. A plugin that connects the job
        with an external scheduler keeps `report`, to send reports to the controller later. `report`
        may be called from any thread, at any time. Its argument is a report from outside the job,
        such as `Noticed` (a fault seen from outside), `PauseRequested`, `ResumeRequested`,
        `SwitchRequested` or `StopRequested`.
        """

    @hookspec
    def tft_on_event(self, event: str, facts: Mapping[str, object]) -> None:
        """
        React to an event that matters to an operator. `facts` has the details of the event.

        Events are `fault`, `stopped`, `strategy_chosen`, `incident_closed`, `job_ends` and all
        other entries of the controller's log. Called in the controller's event loop, so it must not
        block.
        """

    @hookspec
    def tft_on_incident_closed(self, incident: Mapping[str, object], began: float) -> None:
        """
        React to the end of an incident. `incident` is its entry in the report of the job, with the
        faults, the strategy and the phases. The times in the entry are in seconds since `began`,
        which is in seconds since 1970.

        Called in the controller's event loop, so it must not block. Called once for each incident,
        when the ranks train again or when the job ends. If the controller is killed at that moment,
        the hook may never be called for this incident.
        """

    @hookspec
    def tft_on_final_step(self, step: int) -> None:
        """
        React to the fact that all steps up to `step` are final: every rank that takes part has
        ended them, with their tails and the functions after them. A recovery from copies in memory
        goes back to no earlier step.

        Called in the controller's event loop, a few times a second at most, so it must not block.
        If `step` is smaller than in the call before, the job has gone back to a checkpoint or to a
        copy in host memory: the steps after `step` are computed again. When a run begins, the hook
        is called with the step from which it goes on. A controller that continues the run of an
        earlier one begins with the last final step.
        """

    @hookspec
    def tft_on_beat(self, node: int, ranks: Sequence[RankBeat]) -> Sequence[Remark] | None:
        """
        Return remarks about the job after a heartbeat of a node, or None if there is nothing to
        say.

        A node sends its heartbeat a few times a second. `ranks` has the status of the ranks on the
        node. Each remark is logged, is passed on to `tft_on_event`, is printed on the console
        unless there are many, and is listed in the report of the job (`remarks`).

        Called in the controller's event loop for every heartbeat of every node, so it must not
        block, and should take a few microseconds for each rank.
        """

    @hookspec
    def tft_advise(self, incident: IncidentView) -> Advice | None:
        """
        Return advice on the strategy to follow in an incident, after all ranks have stopped.

        Called on a separate thread. The controller waits at most 30 s for the advice. A plugin that
        needs more time returns an `Advice` with `wait`, and is asked again. Return None to give no
        advice.
        """

    # ------------------------------------------------------------ hooks for the report

    @hookspec(firstresult=True)
    def tft_fault_moment(
        self, run_dir: Path, kind: str, rank: int | None, seen: float
    ) -> float | None:
        """
        Return the time when a fault really happened (CLOCK_MONOTONIC, in seconds).

        The report of the job uses this time. `seen` is the time of the first evidence of the fault.
        Return None if this plugin does not know when the fault happened.
        """
