"""
A device for tests: one thread that carries out calls in order, as the stream of a real device does.

Tensors of this device are CPU tensors, and its kind is `cpu`. The host computes forward and
backward itself. Collectives and optimizer steps are carried out by the thread, some time after the
host has asked for them. `install` makes torch and tft see the device.
"""

import queue
import threading
from collections.abc import Callable

import torch

LAG = 0.002
"""Seconds by which each call is carried out later than the host asked for it, at least."""


class Stream:
    """
    Carries out calls in order, on its own thread.
    """

    def __init__(self) -> None:
        self._calls: queue.Queue[Callable[[], object]] = queue.Queue()
        self._pause = threading.Event()  # never set, so a wait lasts its whole time
        self._lock = threading.Lock()
        self._open = 0
        """The number of calls that are not over."""
        self._done = threading.Condition(self._lock)
        self._error: BaseException | None = None

    def start(self) -> None:
        """
        Start the thread. Called in the process that uses the device: a fork has no threads.
        """
        threading.Thread(target=self._work, name="device", daemon=True).start()

    def submit(self, call: Callable[[], object]) -> None:
        """
        Put a call into the queue. Returns at once.
        """
        with self._lock:
            self._open += 1
        self._calls.put(call)

    def synchronize(self, device: object = None) -> None:
        """
        Wait until all calls are over. Raises the first exception that one of them has raised.
        """
        with self._done:
            self._done.wait_for(lambda: not self._open)
            error, self._error = self._error, None
        if error is not None:
            raise error

    def query(self) -> bool:
        """
        Return whether all calls are over.
        """
        with self._lock:
            return not self._open

    def _work(self) -> None:
        while True:
            call = self._calls.get()
            self._pause.wait(LAG)
            try:
                call()
            except BaseException as error:  # noqa: BLE001  # the host gets any exception, in `synchronize`
                self._error = self._error or error
            with self._done:
                self._open -= 1
                self._done.notify_all()
            del call  # `call` may hold the last reference to a process group


stream = Stream()
"""The only stream of this process."""


def patch_torch() -> None:
    """
    Start the stream, and make `torch.cpu`, torch's module of the device, ask it.
    """
    stream.start()
    torch.cpu.synchronize = stream.synchronize
    torch.cpu.current_stream = lambda device=None: stream  # type: ignore[assignment, return-value]  # `stream` has the method `query`
