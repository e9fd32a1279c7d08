"""
The plugin that adds the option `--orchestrated` to `tft run`, and that lets the cluster's manager
take part in the controller's decisions when the option is given.
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
    The plugin in a process that expects no orchestrator. It only adds the option `--orchestrated`.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        """
        Return the command-line option `--orchestrated`.
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
    # Any: an option may have a value of any type
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:
        """
        Return the environment variable that tells the controller at which path to listen for the
        orchestrator.

        Return an empty map if `--orchestrated` was not given, or if the variable is already set.
        """
        if not options["orchestrated"] or orchestrator_socket() is not None:
            return {}
        return {ORCHESTRATOR: str(Path(tempfile.mkdtemp(prefix="tft-mindio-")) / "desk")}


class Orchestrated(Negotiator, Option):
    """
    The plugin in a process that expects an orchestrator: it lets the orchestrator take part in the
    decisions of the controller.
    """

    def __init__(self, path: Path) -> None:
        self._desk = Desk(path)
        self._trains = False
        """True if nodes have joined the controller, and their job is not over."""
        self._over = False
        super().__init__(self._desk, limit=float(variables().wait_orchestrator))

    @hookimpl
    def tft_on_leader(self, report: Any) -> None:  # Any: a function of the controller
        """
        Open the socket for the orchestrator, because the controller of this process leads now.
        """
        super().tft_on_leader(report)
        self._desk.open(self._call, self.changed)

    @hookimpl
    def tft_on_event(
        self, event: str, facts: Mapping[str, Any]
    ) -> None:  # Any: a fact may have any type
        """
        Record whether the controller has a job to lead, and report the progress of the job to the
        orchestrator.
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
        Carry out the call by which the manager gives up this controller. End the job if no node has
        joined yet.

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
