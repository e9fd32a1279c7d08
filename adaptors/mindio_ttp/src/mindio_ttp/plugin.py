"""
The plugin that adds the option `--orchestrated` to the command `tft run`. If this option is given,
the plugin lets an orchestrator (the manager of a cluster) take part in the decisions of the
controller.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import structlog

from mindio_ttp.environment import ORCHESTRATOR, orchestrator_socket, variables
from mindio_ttp.link import ENDS, STAYS, Desk, ranks
from mindio_ttp.negotiator import Negotiator
from tft.spi import StopRequested, hookimpl

log = structlog.get_logger()


class Option:
    """
    The plugin in a process that expects no orchestrator (manager of a cluster). The plugin then
    only adds the option `--orchestrated` to the command `tft run`.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        """
        Return the option `--orchestrated`, which tft adds to the command `tft run`.
        """
        return [
            click.Option(
                ["--orchestrated"],
                is_flag=True,
                help=(
                    "The manager of the cluster takes part in decisions, through "
                    "mindio_ttp.controller_ttp."
                ),
            )
        ]

    @hookimpl
    # Any: the value of a command-line option may have any type
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """
        Return the environment variable with the path of the socket at which the controller listens
        for an orchestrator (the manager of a cluster).

        Return an empty map if the option `--orchestrated` was not given, or if the variable is
        already set in this process.
        """
        if not options["orchestrated"] or orchestrator_socket() is not None:
            return {}
        return {ORCHESTRATOR: str(Path(tempfile.mkdtemp(prefix="tft-mindio-")) / "desk")}


class Orchestrated(Negotiator, Option):
    """
    The plugin in a process that expects an orchestrator (the manager of a cluster). The plugin lets
    the orchestrator take part in the decisions of the controller.
    """

    def __init__(self, path: Path) -> None:
        self._desk = Desk(path)
        self._trains = False
        """True if nodes have joined the controller, and the job is not over. The controller then
        runs on even if the orchestrator no longer needs it."""
        self._over = False
        super().__init__(self._desk, limit=float(variables().wait_orchestrator))

    @hookimpl
    def tft_on_leader(self, report: Any) -> None:  # Any: a function that takes reports
        """
        Store `report`, the function that sends a message to the controller, and listen for
        orchestrators at the socket. tft calls this hook when the controller of this process begins
        to lead.
        """
        super().tft_on_leader(report)
        self._desk.open(self._call, self.changed)

    @hookimpl
    def tft_on_event(
        self, event: str, facts: Mapping[str, Any]
    ) -> None:  # Any: a fact may have any type
        """
        Record from the event whether the job of the controller is running, and report the progress
        of the job to the orchestrator. `facts` has the details of the event.
        """
        match event:
            case "leads":
                self._trains = bool(facts["nodes"])
            case "node_joined":
                self._trains = True
            case "job_ends":
                self._trains = False
                self._over = True
            case _:
                pass
        super().tft_on_event(event, facts)

    def _call(self, name: str, arguments: list[Any], *, speaks: bool) -> int:
        if name == "hello":
            return 0
        if name == "release":
            return self._release() if speaks else STAYS
        if not speaks:
            log.warning("call_not_followed", call=name, why="a later orchestrator decides")
            return 1
        given = [ranks(each) for each in arguments]
        match name:
            case "stop_train":
                self.stop_train(*given)
            case "pause_train":
                self.pause_train(*given)
            case "on_global_rank":
                self.on_global_rank(*given)
            case "change_strategy":
                self.change_strategy(*given)
            case "prepare_action":
                self.prepare_action(*given)
            case "dump":
                self.dump()
            case _:
                return 1
        return 0

    def _release(self) -> int:
        """
        Carry out the call `release`, by which the orchestrator says that it no longer needs this
        controller. If no node has joined the controller yet, end the job.

        Return `STAYS` if the controller runs on until its job is over. Otherwise return `ENDS`.
        """
        if self._trains:
            return STAYS
        if not self._over:
            why = "the controller of the job was destroyed before any rank had joined"
            self._say(StopRequested(why=why, signal=0, at=0.0))
        return ENDS


def _plugin() -> Option:
    path = orchestrator_socket()
    return Option() if path is None else Orchestrated(path)


plugin = _plugin()
