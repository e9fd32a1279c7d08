"""
The plugin of the command line and of the controller: `tft run --orchestrated`.
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mindio_ttp.environment import ORCHESTRATOR, orchestrator_socket, variables
from mindio_ttp.link import Desk, ranks
from mindio_ttp.negotiator import Negotiator
from tft.hooks import hookimpl


class Option:
    """
    What there is of it in every process.
    """

    @hookimpl
    def tft_options(self) -> Sequence[click.Option]:
        """
        The option.
        """
        return [
            click.Option(
                ["--orchestrated"],
                is_flag=True,
                help="What manages the cluster has its say, through mindio_ttp.controller_ttp.",
            )
        ]

    @hookimpl
    def tft_environment(self, options: Mapping[str, Any]) -> Mapping[str, str]:  # Any: see there
        """
        Where the controller listens for it.
        """
        if not options["orchestrated"] or orchestrator_socket() is not None:
            return {}
        return {ORCHESTRATOR: str(Path(tempfile.mkdtemp(prefix="tft-mindio-")) / "desk")}


class Orchestrated(Negotiator, Option):
    """
    What there is of it where an orchestrator is expected.
    """

    def __init__(self, path: Path) -> None:
        self._desk = Desk(path)
        super().__init__(self._desk, limit=float(variables().wait_orchestrator))

    @hookimpl
    def tft_led(self, report: Any) -> None:  # Any: see the specification
        """
        The orchestrator may come.
        """
        super().tft_led(report)
        self._desk.open(self._call)

    def _call(self, name: str, arguments: list[Any]) -> int:
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
            case "hello":
                pass
            case _:
                return 1
        return 0


def _plugin() -> Option:
    path = orchestrator_socket()
    return Option() if path is None else Orchestrated(path)


plugin = _plugin()
