"""
The connection between the process of the controller and the process of an orchestrator (the manager
of a cluster).

The controller sends reports about faults to the orchestrator, and the orchestrator calls the
controller to choose a recovery. The two processes exchange lines of JSON over a Unix socket. If no
orchestrator is connected, the controller decides without an orchestrator.
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
"""The seconds within which the process of the controller must answer a call of an orchestrator.
This limit is short, because the process answers before the call has taken effect."""
PAUSE = 0.1
"""The seconds between two attempts of an orchestrator to connect to a controller, which may still
be starting."""

ENDS, NOBODY, STAYS = 0, 1, 2
"""The possible results of the call `release`, by which the manager of a cluster says that it no
longer needs its controller. `ENDS`: the controller ends. `NOBODY`: no controller has answered.
`STAYS`: the controller runs on until its job is over."""


class Call(Protocol):
    """
    The type of the function that carries out the calls of orchestrators.
    """

    def __call__(self, name: str, arguments: list[Any], *, speaks: bool) -> int:
        """
        Carry out the call with the name `name` of an orchestrator. Return 0, or 1 if the call
        cannot be carried out. The call `release` returns `ENDS` or `STAYS` instead.

        Several orchestrators may be connected, and only one of them decides. `speaks` is True if
        the call comes from the orchestrator that decides.
        """


class Desk:
    """
    The server in the controller's process to which orchestrators connect.

    If several orchestrators are connected, only the orchestrator that has connected last decides
    and gets the reports. When this orchestrator disconnects, the orchestrator that had connected
    before it decides from then on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writing = threading.Lock()
        self._guests: list[socket.socket] = []
        self._call: Call = lambda name, arguments, *, speaks: 1
        self._changed: Callable[[], None] = lambda: None

    def open(self, call: Call, changed: Callable[[], None]) -> None:
        """
        Listen for orchestrators at the socket. If an earlier controller has left a socket file,
        replace that file.

        The function `call` carries out the calls of orchestrators. The function `changed` is called
        when the orchestrator that decides has changed, or when no orchestrator is left.
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

    def hear(self, name: str, *facts: Any) -> None:  # Any: values that JSON can represent
        """
        Send the report `name` with its `facts` to the orchestrator that decides. Do nothing if no
        orchestrator is connected.
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
            # tell about a change only if the orchestrator that decides has left
            if was_heard:
                self._changed()

    def _answer(self, guest: socket.socket, name: str, arguments: list[Any]) -> int:
        try:
            return self._call(name, arguments, speaks=guest in self._guests[-1:])
        except Exception:  # log an error in one call, because it must not end this thread
            log.exception("orchestrator_not_followed", call=name)
            return 1

    def _tell(self, guest: socket.socket, said: Mapping[str, Any]) -> None:
        # ignore an error of the connection here, because the method `_serve` reads from the
        # connection and notices its end
        with self._writing, suppress(OSError):
            guest.sendall(json.dumps(said).encode() + b"\n")


class Line:
    """
    The connection to the controller, in the process of an orchestrator (the manager of a cluster).

    The function `heard` is called on a separate thread, with the name and the facts of each report
    of the controller. If the connection ends, this object connects again as soon as a controller
    listens.
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
        # The function `heard` runs on a separate thread, because `heard` may call the controller
        # and wait for the answer. The thread of the method `_keep` receives the answer.
        threading.Thread(target=self._report, name="mindio-report", daemon=True).start()

    def call(self, name: str, *arguments: Any) -> int:  # Any: values that JSON can represent
        """
        Send the call `name` to the controller, and return the controller's answer. Return 1 if no
        controller is connected, or if the controller does not answer within `ANSWER_LIMIT`.
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
            # drop all other answers, because these answers belong to calls that have timed out
            self._answers.clear()
            return answer

    def there(self, limit: float) -> bool:
        """
        Wait up to `limit` seconds until a controller is connected. Return whether a controller is
        connected then.
        """
        with self._turn:
            return self._turn.wait_for(lambda: self._socket is not None, timeout=limit)

    def close(self) -> None:
        """
        Close the connection to the controller, and do not connect again.
        """
        self._closed.set()
        self._reports.put(None)
        with self._turn:
            self._shut()

    def _keep(self) -> None:
        """
        Connect to the controller, and receive the answers and reports that the controller sends.
        When the connection ends, connect again. Return when `close` is called.
        """
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
        Call the function `heard` with each received report, one after another, in the order of
        their arrival. Return when `close` is called.
        """
        while (report := self._reports.get()) is not None:
            self._heard(*report)


def _lines(line: socket.socket) -> Iterator[Any]:
    with suppress(OSError), line.makefile("rb") as file:
        for text in file:
            yield json.loads(text)


def _plain(values: tuple[Any, ...]) -> list[Any]:
    """
    Return the values in a form that JSON can represent: each dict is replaced by a list of its
    pairs, under the key "ranks". The function `ranks` converts this form back.

    The replacement is necessary because the keys of these dicts are ranks, and JSON does not allow
    numbers as keys.
    """
    return [
        {"ranks": sorted(value.items())} if isinstance(value, dict) else value for value in values
    ]


def ranks(value: Any) -> Any:
    """
    Return the dict that `_plain` has replaced by `value`, a list of pairs under the key "ranks".
    Return any other value unchanged.
    """
    if isinstance(value, dict) and "ranks" in value:
        return {int(rank): what for rank, what in value["ranks"]}
    return value
