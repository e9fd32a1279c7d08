"""
The connection between the controller's process and the process of the orchestrator.

The negotiation runs in the controller's process, and the orchestrator's functions are called in its
own process. They exchange lines of JSON over a socket of this machine. The controller does not wait
for an orchestrator that is not connected: it then decides by itself.
"""

import json
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import structlog

log = structlog.get_logger()

ANSWER_LIMIT = 10.0
"""Seconds for the controller's process to answer a call, which it only passes on."""
PAUSE = 0.1
"""Seconds between two attempts to reach a controller that is starting."""

ENDS, NOBODY, STAYS = 0, 1, 2
"""The result of a release of the controller: it ends, it cannot be asked, or it stays until its job
is over."""


class Call(Protocol):
    """
    Carries out a call by name with its arguments. Returns 0, or 1 for a call it cannot carry out.

    `speaks`: the call comes from the orchestrator that decides.
    """

    def __call__(self, name: str, arguments: list[Any], *, speaks: bool) -> int:
        """Return the answer."""


class Desk:
    """
    The controller's end of the connection: the orchestrator, as the negotiation sees it.

    If several orchestrators are connected, the latest one decides and gets the reports, until it
    leaves.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._guests: list[socket.socket] = []
        self._call: Call = lambda name, arguments, *, speaks: 1
        self._changed: Callable[[], None] = lambda: None

    def open(self, call: Call, changed: Callable[[], None]) -> None:
        """
        Listen for orchestrators. A controller that is started again takes the place of the one
        before.

        `call` carries out the calls. `changed` is called when another orchestrator decides from now
        on, or none.
        """
        self._call, self._changed = call, changed
        self._path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen()
        threading.Thread(
            target=self._listen, args=(listener,), name="mindio-desk", daemon=True
        ).start()

    def present(self) -> bool:
        """
        Return whether an orchestrator is connected.
        """
        return bool(self._guests)

    def hear(self, name: str, *facts: Any) -> None:  # Any: JSON
        """
        Send a report to the orchestrator that decides.
        """
        for guest in self._guests[-1:]:
            self._tell(guest, {"report": name, "facts": _plain(facts)})

    def _listen(self, listener: socket.socket) -> None:
        while True:
            guest, _ = listener.accept()
            threading.Thread(
                target=self._serve, args=(guest,), name="mindio-desk-guest", daemon=True
            ).start()

    def _serve(self, guest: socket.socket) -> None:
        self._guests.append(guest)
        log.info("orchestrator_came", before=len(self._guests) - 1)
        self._changed()
        try:
            for said in _lines(guest):
                answer = self._answer(guest, said["call"], said["arguments"])
                self._tell(guest, {"answer": answer, "number": said["number"]})
        finally:
            log.info("orchestrator_left", left=len(self._guests) - 1)
            was_heard = guest in self._guests[-1:]
            self._guests.remove(guest)
            guest.close()
            if was_heard:  # otherwise the deciding orchestrator stays, and has the reports
                self._changed()

    def _answer(self, guest: socket.socket, name: str, arguments: list[Any]) -> int:
        try:
            return self._call(name, arguments, speaks=guest in self._guests[-1:])
        except Exception:  # a call from outside must not end this thread
            log.exception("orchestrator_not_followed", call=name)
            return 1

    def _tell(self, guest: socket.socket, said: Mapping[str, Any]) -> None:
        with self._writing, suppress(OSError):  # a closed connection is noticed by its reader
            guest.sendall(json.dumps(said).encode() + b"\n")


class Line:
    """
    The orchestrator's end of the connection.

    `heard` is called with the name of a report and its facts, on a thread of its own. The line
    connects again whenever the controller is there.
    """

    def __init__(self, path: Path, heard: Callable[[str, list[Any]], None]) -> None:
        self._path = path
        self._heard = heard
        self._turn = threading.Condition()
        self._socket: socket.socket | None = None
        self._calls = 0
        self._answers: dict[int, int] = {}
        self._reports: queue.SimpleQueue[tuple[str, list[Any]] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._calling = threading.Lock()
        threading.Thread(target=self._keep, name="mindio-line", daemon=True).start()
        # not on the thread that reads: the callback may call, and wait for the answer
        threading.Thread(target=self._report, name="mindio-report", daemon=True).start()

    def call(self, name: str, *arguments: Any) -> int:  # Any: JSON
        """
        Call the controller and return its answer; 1 where it does not answer.
        """
        with self._calling, self._turn:
            line = self._socket
            if line is None:
                return 1
            self._calls += 1
            number = self._calls
            try:
                said = {"call": name, "arguments": _plain(arguments), "number": number}
                line.sendall(json.dumps(said).encode() + b"\n")
            except OSError:
                return 1
            self._turn.wait_for(
                lambda: number in self._answers or self._socket is not line, timeout=ANSWER_LIMIT
            )
            answer = self._answers.get(number, 1)
            self._answers.clear()  # other answers are of calls that have timed out
            return answer

    def there(self, limit: float) -> bool:
        """
        Return True if the line is connected to the controller within `limit` seconds.
        """
        with self._turn:
            return self._turn.wait_for(lambda: self._socket is not None, timeout=limit)

    def close(self) -> None:
        """
        Close the line: the orchestrator leaves.
        """
        self._closed.set()
        self._reports.put(None)
        with self._turn:
            self._shut()

    def _keep(self) -> None:
        while not self._closed.is_set():
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                line.connect(str(self._path))
            except OSError:
                line.close()
                self._closed.wait(PAUSE)
                continue
            self._set(line)
            for said in _lines(line):
                self._take(said)
            self._set(None)
            line.close()

    def _set(self, line: socket.socket | None) -> None:
        with self._turn:
            self._socket = line
            if self._closed.is_set():
                self._shut()
            self._turn.notify_all()

    def _shut(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _take(self, said: Mapping[str, Any]) -> None:
        if "answer" not in said:
            self._reports.put((said["report"], said["facts"]))
            return
        with self._turn:
            self._answers[said["number"]] = said["answer"]
            self._turn.notify_all()

    def _report(self) -> None:
        """
        Pass the reports on, one after another in their order.
        """
        while (report := self._reports.get()) is not None:
            self._heard(*report)


def _lines(line: socket.socket) -> Iterator[Any]:
    with suppress(OSError), line.makefile("rb") as file:
        for text in file:
            yield json.loads(text)


def _plain(values: tuple[Any, ...]) -> list[Any]:
    """
    Return the values with each dict as a list of pairs, since JSON has no numbers as keys.

    The keys of these dicts are ranks.
    """
    return [
        {"ranks": sorted(value.items())} if isinstance(value, dict) else value for value in values
    ]


def ranks(value: Any) -> Any:
    """
    Return the dict that `_plain` has written as pairs; any other value unchanged.
    """
    if isinstance(value, dict) and "ranks" in value:
        return {int(rank): what for rank, what in value["ranks"]}
    return value
