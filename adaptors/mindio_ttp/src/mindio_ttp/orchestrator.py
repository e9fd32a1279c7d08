"""
The part of this package that runs in the process of an orchestrator (the manager of a cluster). It
starts the controller and communicates with the controller.

The controller sends reports, which are passed to the functions that the orchestrator has
registered. The orchestrator makes calls, which are sent to the controller.
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
"""The names of the controller's reports for which an orchestrator must register functions."""
START_LIMIT = 60
"""The seconds within which a new controller must answer. This limit is long, because a new process
starts slowly on a busy machine."""
END_LIMIT = 1860.0
"""The seconds within which a controller must end after it was told to end. This limit is long,
because the controller may have to wait until the state of its job is saved."""
PAUSE = 0.1
"""The seconds between two checks whether a controller that was told to end is still running."""
FOLLOWED = 1.0
"""The seconds between two checks whether the controller that an earlier manager has started is
still running."""


class Orchestrator:
    """
    The orchestrator's side of the connection to the controller. The orchestrator is the manager of
    a cluster. Each process has exactly one object of this class.
    """

    def __init__(self) -> None:
        self.world = 0
        self._rank: int | None = None
        """The rank of this process, or -1 if this process trains nothing. None before `init`."""
        self._started = False
        self._functions: dict[str, Callable[..., Any]] = {}  # Any: functions may have any signature
        self._line: Line | None = None
        self._lead: Lead | None = None
        """The controller process (`tft lead`) to which this process is connected, if this process
        has the rank -1. None if this process has another rank."""
        self._over = threading.Event()
        """An event that is set when this process calls `tft_destroy_controller`."""
        self._follower: threading.Thread | None = None
        """The thread that waits for the end of a controller that an earlier manager has started,
        and then starts a new controller. None if there was no such controller."""
        self._exits = False
        """True if the method `destroy` is registered to run at the exit of this process."""

    @property
    def registered(self) -> bool:
        """
        True if the orchestrator has registered functions for all reports of the controller.
        """
        return all(name in self._functions for name in REPORTS)

    def register(self, name: str, function: Callable[..., Any]) -> None:  # Any: of any type
        """
        Register the function that is called with each report of the controller that has the name
        `name`.
        """
        self._functions[name] = function

    def init(self, rank: int, world: int) -> None:
        """
        Set the rank of this process (-1 if it trains nothing) and the number of ranks, `world`.
        Raises `Refused` if the method was called before and `destroy` was not called since.
        """
        if self._rank is not None:
            raise Refused(
                "tft_init_controller was already called in this process: call it once, or call "
                "tft_destroy_controller before the second call"
            )
        self._rank, self.world = rank, world

    def start(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        """
        Start the controller if this process has rank -1. Otherwise connect to the controller that
        was started with the job.

        A process with another rank than -1 connects only if functions for all reports are
        registered. A call after a successful one has no effect. `options` are options of the
        command `tft lead`, and `task` is the name of the job, which may be empty.

        Raises `Refused` if `init` was not called, or if the process cannot connect to a controller.
        """
        if self._rank is None:
            raise Refused(
                "tft_start_controller was called before tft_init_controller: call "
                "tft_init_controller first"
            )
        if self._started:
            return
        # set this now, because the controller may send its first report before this method returns
        self._started = True
        try:
            if self._rank < 0:
                self._start_alone(host, port, options, task)
            elif self.registered:
                self._find()
        except BaseException:
            # otherwise the next call would return as if there were a controller
            self._started = False
            line, self._line = self._line, None
            if line is not None:
                line.close()
            raise

    def destroy(self) -> None:
        """
        End the connection to the controller. If this process has rank -1, also end the controller.

        A controller whose job is running is not ended, but runs on until the job is over. A later
        call of `start` then finds this controller.
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

    def call(self, name: str, *arguments: Any) -> int:  # Any: values that JSON can represent
        """
        Send the call `name` with its `arguments` to the controller, and return the controller's
        answer. Return 1 if this process is not connected to a controller.
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
            # Make no connection, because this process will replace itself by `tft run`. The new
            # process of the rank that `tft run` starts connects to the controller.
            return
        self._connect(path)

    def _start_alone(self, host: str, port: int, options: tuple[str, ...], task: str) -> None:
        """
        Connect to the running controller of this job. If no controller of this job runs, start a
        controller first. The ranks of the job may be started later.

        Raises `Refused` if the controller ends or does not answer.
        """
        name = task or f"mindio-{host}-{port}"
        lead = Lead(name, self.world, host, port)
        if self._lead is not None and self._lead.desk == lead.desk:
            # keep the old object `Lead`, because that object knows the controller process that it
            # has started
            lead = self._lead
        words = [
            *("--nnodes", str(self.world), "--broker", f"{host}:{port}"),
            *("--adaptor", "mindio", "--start", name, *environment.run_options(), *options),
        ]
        self._lead = lead
        self._over = threading.Event()
        line = self._connect(lead.desk)
        found = not lead.start(words)
        for _ in range(START_LIMIT):
            # If the controller answers, it listens to this process from now on. It no longer
            # listens to an earlier process that has called `tft_start_controller`.
            if line.there(1.0) and line.call("hello") != NOBODY:
                break
            if found:
                # start a new controller, because the controller that was found may have ended
                found = not lead.start(words)
            elif lead.code() is not None:
                break  # the controller has ended, and the log of the controller has the reason
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
        Wait until the controller that `start` has found ends, and then start a new controller. Stop
        waiting when the event `over` is set. `words` are the arguments of the new controller.

        A new controller is necessary because the job of the found controller may have been ending
        already. The ranks of the next job then need a new controller.
        """
        while not over.wait(FOLLOWED):
            if lead.code() == 0:
                return  # the controller has ended with exit code 0: its job has completed
            if lead.start(words):
                log.info("controller_started_again", pid=lead.pid())
                return

    def _release(self, lead: Lead, line: Line) -> None:
        """
        Tell the controller `lead`, over the connection `line`, that this process no longer needs
        the controller. If the controller answers that it ends, wait for the end of its process.

        Log a warning if the controller does not answer or does not end in time.
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
                "controller_stays",
                pid=lead.pid(),
                why="the controller leads a job, and ends together with that job",
            )
        elif not _gone(lead, END_LIMIT):
            log.warning(
                "controller_left",
                pid=lead.pid(),
                why=f"the controller has not ended within {END_LIMIT:.0f} s",
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
        except Exception:  # an error in a registered function must not end the receiving thread
            log.exception("orchestrator_function_failed", report=name)


def _gone(lead: Lead, limit: float) -> bool:
    """
    Wait for the end of the controller `lead` for at most `limit` seconds. Return True if the
    controller has ended.
    """
    pause = threading.Event()
    for _ in range(int(limit / PAUSE)):
        if not lead.lives():
            return True
        pause.wait(PAUSE)
    return False


orchestrator = Orchestrator()
"""The orchestrator's side of the connection to the controller, in this process."""
