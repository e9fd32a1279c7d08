"""
The process of an orchestrator: its functions hear the controller, its calls reach it.
"""

import atexit
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from mindio_ttp import environment
from mindio_ttp.checks import Refused
from mindio_ttp.link import Line, ranks

log = structlog.get_logger()

REPORTS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
START_LIMIT = 60
"""Seconds for a controller to lead: it is a new process on a busy machine."""
END_LIMIT = 1860.0
"""Seconds for it to end: what it leads may have to be saved."""


class Orchestrator:
    """
    That of this process.
    """

    def __init__(self) -> None:
        self.world = 0
        self._rank: int | None = None
        self._started = False
        self._functions: dict[str, Callable[..., Any]] = {}  # Any: the program's own
        self._line: Line | None = None
        self._lead: subprocess.Popen[bytes] | None = None
        self._room: Path | None = None
        """The directory of the socket, where it was made here."""

    @property
    def registered(self) -> bool:
        """
        All that the controller reports is heard.
        """
        return all(name in self._functions for name in REPORTS)

    def register(self, name: str, function: Callable[..., Any]) -> None:  # Any: the program's own
        """
        Called with what is reported under this name.
        """
        self._functions[name] = function

    def init(self, rank: int, world: int) -> None:
        """
        Once in a process.
        """
        if self._rank is not None:
            raise Refused("tft_init_controller was called before in this process")
        self._rank, self.world = rank, world

    def start(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        """
        Start the controller, or find the one that was started with the job.
        """
        if self._rank is None:
            raise Refused("tft_start_controller: tft_init_controller comes first")
        if self._started:
            return
        self._started = True
        if self._rank < 0:
            self._start_alone(host, port, options, task)
        elif self.registered:
            self._find()

    def destroy(self) -> None:
        """
        End what was begun here.
        """
        self._started, self._rank = False, None
        if self._line is not None:
            self._line.close()
            self._line = None
        lead, self._lead = self._lead, None
        if lead is None:
            return
        lead.terminate()  # a job that runs is saved first
        try:
            lead.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            log.warning("controller_killed", why=f"it has not ended for {END_LIMIT:.0f} s")
            lead.kill()
            lead.wait()
        if self._room is not None:
            shutil.rmtree(self._room, ignore_errors=True)

    def call(self, name: str, *arguments: Any) -> int:  # Any: JSON
        """
        Tell the controller; 1 where there is none.
        """
        return 1 if self._line is None else self._line.call(name, *arguments)

    def _find(self) -> None:
        path = environment.orchestrator_socket()
        if path is None:
            if environment.below_tft():
                raise Refused(
                    "tft_register_mindx_callback was called, and this job was started without an "
                    "orchestrator: add --orchestrated to its `tft run`"
                )
            return  # this process is about to become the launcher, whose rank finds it
        self._connect(path)

    def _start_alone(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        self._room = Path(tempfile.mkdtemp(prefix="tft-mindio-"))
        path = self._room / "desk"
        name = task or f"mindio-{host}-{port}"
        words = [
            *("lead", "--nnodes", str(self.world), "--broker", f"{host}:{port}"),
            *("--adaptor", "mindio", "--start", name, *environment.run_options(), *options),
        ]
        self._lead = subprocess.Popen(
            [sys.executable, "-P", "-m", "tft", *words],
            env=environment.with_orchestrator(path),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.destroy)
        self._connect(path)
        assert self._line is not None
        for _ in range(START_LIMIT):
            if self._line.there(1.0):
                return
            if self._lead.poll() is not None:
                break  # it has said why
        code = self._lead.poll()
        self.destroy()
        raise Refused(f"tft_start_controller: no controller leads (it ended with {code})")

    def _connect(self, path: Path) -> None:
        self._line = Line(path, self._heard)
        atexit.register(self._line.close)

    def _heard(self, name: str, facts: list[Any]) -> None:
        function = self._functions.get(f"report_{name}")
        if function is None:
            return
        try:
            function(*(ranks(fact) for fact in facts))
        except Exception:  # the orchestrator's own
            log.exception("orchestrator_function_failed", report=name)


orchestrator = Orchestrator()
"""The one of this process."""
