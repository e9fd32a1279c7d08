"""
The process of an orchestrator (the manager of a cluster): starts the controller, and exchanges
reports and calls with it.

Reports of the controller go to the functions that the orchestrator has registered. Calls of the
orchestrator go to the controller.
"""

import atexit
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from mindio_ttp import environment
from mindio_ttp.checks import Refused
from mindio_ttp.lead import Lead
from mindio_ttp.link import ENDS, NOBODY, Line, ranks

log = structlog.get_logger()

REPORTS = ("report_fault_ranks", "report_stop_complete", "report_strategies", "report_result")
"""The reports of the controller for which an orchestrator must register functions."""
START_LIMIT = 60
"""Seconds within which a new controller must answer. This limit is long, because a new process
starts slowly on a busy machine."""
END_LIMIT = 1860.0
"""Seconds within which a controller must end. This limit is long, because the state of its job may
have to be saved first."""
PAUSE = 0.1
"""Seconds between two checks whether a controller is still running."""
FOLLOWED = 1.0
"""Seconds between two checks whether a controller that another process has started is still
running."""


class Orchestrator:
    """
    The orchestrator's side of the connection to the controller. Each process has exactly one
    `Orchestrator`.
    """

    def __init__(self) -> None:
        self.world = 0
        self._rank: int | None = None
        """The rank of this process, -1 if it trains nothing. None before `init`."""
        self._started = False
        self._functions: dict[str, Callable[..., Any]] = {}  # Any: any signature
        self._line: Line | None = None
        self._lead: Lead | None = None
        """The `tft lead` process that this process uses, if this process has no rank."""
        self._over = threading.Event()
        """Set when this process has called `tft_destroy_controller`."""
        self._follower: threading.Thread | None = None
        """The thread that starts a new controller when the controller that was found ends."""
        self._exits = False
        """True if `destroy` is registered to run at the exit of this process."""

    @property
    def registered(self) -> bool:
        """
        True if functions are registered for all reports of the controller.
        """
        return all(name in self._functions for name in REPORTS)

    def register(self, name: str, function: Callable[..., Any]) -> None:  # Any: any signature
        """
        Register the function that is called with the reports of this name.
        """
        self._functions[name] = function

    def init(self, rank: int, world: int) -> None:
        """
        Set the rank and the size of the world. Raises `Refused` on a second call in a process.
        """
        if self._rank is not None:
            raise Refused("tft_init_controller was already called in this process")
        self._rank, self.world = rank, world

    def start(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        """
        Start the controller if this process has rank -1. Otherwise connect to the controller that
        was started with the job.

        A rank connects only if functions for all reports are registered. A second call has no
        effect.
        """
        if self._rank is None:
            raise Refused("tft_start_controller: call tft_init_controller first")
        if self._started:
            return
        self._started = True
        if self._rank < 0:
            self._start_alone(host, port, options, task)
        elif self.registered:
            self._find()

    def destroy(self) -> None:
        """
        End the connection to the controller, and the controller itself if this process has rank -1.

        But a controller whose job is running is not ended: it runs on until the job is over. A
        later call of `start` then finds this controller.
        """
        self._started, self._rank = False, None
        self._over.set()
        if self._follower is not None:
            self._follower.join()
            self._follower = None
        line, self._line = self._line, None
        if line is None:
            return
        if self._lead is not None:
            self._release(self._lead, line)
            self._lead.tidy()
        line.close()

    def call(self, name: str, *arguments: Any) -> int:  # Any: values that JSON can have
        """
        Send a call to the controller and return its answer. Return 1 if there is no controller.
        """
        return 1 if self._line is None else self._line.call(name, *arguments)

    def _find(self) -> None:
        path = environment.orchestrator_socket()
        if path is None:
            if environment.below_tft():
                raise Refused(
                    "tft_register_mindx_callback was called, but this job was started without an "
                    "orchestrator: add --orchestrated to the command `tft run`"
                )
            return  # this process becomes a `tft run`, whose rank runs the script and connects
        self._connect(path)

    def _start_alone(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        """
        Find the running controller of this job, or start one, and connect to it. The ranks of the
        job may be started later. Raises `Refused` if the controller ends or does not answer.
        """
        name = task or f"mindio-{host}-{port}"
        lead = Lead(name, self.world, host, port)
        if self._lead is not None and self._lead.desk == lead.desk:
            lead = self._lead  # keep the object, which knows the child process that it has started
        words = [
            *("--nnodes", str(self.world), "--broker", f"{host}:{port}"),
            *("--adaptor", "mindio", "--start", name, *environment.run_options(), *options),
        ]
        self._lead = lead
        self._over = threading.Event()
        line = self._connect(lead.desk)
        found = not lead.start(words)
        for _ in range(START_LIMIT):
            # when the controller answers, this manager has taken the place of an earlier manager
            if line.there(1.0) and line.call("hello") != NOBODY:
                break
            if found:
                found = not lead.start(words)  # the found controller may have ended
            elif lead.code() is not None:
                break  # the controller has logged the reason
        else:
            self._give_up(f"`tft lead` (process {lead.pid()}) does not answer for {START_LIMIT} s")
        if not found and lead.code() is not None:
            self._give_up(f"no controller leads (it ended with {lead.code()})")
        if found:
            log.info("controller_found", pid=lead.pid())
            self._follower = threading.Thread(
                target=self._follow,
                args=(lead, words, self._over),
                name="mindio-follower",
                daemon=True,
            )
            self._follower.start()

    def _give_up(self, why: str) -> None:
        self.destroy()
        raise Refused(f"tft_start_controller: {why}")

    def _follow(self, lead: Lead, words: Sequence[str], over: threading.Event) -> None:
        """
        Wait until the controller that `start` has found ends, and then start a new controller.

        The job of the found controller may have been ending already. The ranks of the next job need
        a new controller.
        """
        while not over.wait(FOLLOWED):
            if lead.code() == 0:
                return  # the job has completed
            if lead.start(words):
                log.info("controller_started_again", pid=lead.pid())
                return

    def _release(self, lead: Lead, line: Line) -> None:
        """
        Tell the controller that this manager gives it up. If the controller then ends, wait for its
        end. Log a warning if the controller does not answer or does not end in time.
        """
        answer = NOBODY
        for _ in range(START_LIMIT):
            if not lead.lives():
                return
            answer = line.call("release")
            if answer != NOBODY or _gone(lead, 1.0):
                break
        if answer == NOBODY and lead.lives():
            log.warning("controller_left", pid=lead.pid(), why="the controller does not answer")
        elif answer != ENDS:
            log.info(
                "controller_stays", pid=lead.pid(), why="it leads a job, and ends with that job"
            )
        elif not _gone(lead, END_LIMIT):
            log.warning(
                "controller_left", pid=lead.pid(), why=f"it has not ended within {END_LIMIT:.0f} s"
            )

    def _connect(self, path: Path) -> Line:
        self._line = Line(path, self._heard)
        if not self._exits:
            atexit.register(self.destroy)
            self._exits = True
        return self._line

    def _heard(self, name: str, facts: list[Any]) -> None:
        function = self._functions.get(f"report_{name}")
        if function is None or not self._started:
            return
        try:
            function(*(ranks(fact) for fact in facts))
        except Exception:  # an error in a registered function must not end this thread
            log.exception("orchestrator_function_failed", report=name)


def _gone(lead: Lead, limit: float) -> bool:
    """
    Wait for the end of the controller for at most `limit` seconds. Return True if it has ended.
    """
    pause = threading.Event()
    for _ in range(int(limit / PAUSE)):
        if not lead.lives():
            return True
        pause.wait(PAUSE)
    return False


orchestrator = Orchestrator()
"""The orchestrator's side of the connection to the controller, in this process."""
