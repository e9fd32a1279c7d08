"""
Signs of life of the processes of tft. Each of these processes writes a byte to a pipe once a
second, and its parent reads the bytes. A process that writes nothing for too long hangs: a debugger
or a container runtime has frozen it, or its event loop is blocked.

A hanging process cannot be continued, unlike one that was stopped with SIGSTOP (`tft.stopped`). Its
parent kills it and starts another one, because a hanging controller, broker or store holds up the
whole job. A hanging agent is not killed, because its ranks would die with it.
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress

BEAT = 1.0
"""The time in seconds between two bytes that a process writes as signs of life."""
LIMIT = 15.0
"""A process that has written no byte for this many seconds counts as hanging. The limit is long,
because the event loop of a healthy process may be blocked for some seconds, for example by a slow
disk."""
BYTE = b"."


class Pulse:
    """
    The writing end of the pipe, in the process that shows that it lives. `descriptor` is the file
    descriptor of this end, which the process has inherited from its parent.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """
        Stop the signs of life and close the pipe, because the process is about to end. After that
        the parent does not count the process as hanging. Call this only if the signs of life come
        from `beat_in_loop`.
        """
        if self._timer is not None:
            self._timer.cancel()
        os.close(self._descriptor)

    def beat_in_loop(self) -> None:
        """
        Write a byte now, and then one byte every `BEAT` seconds from the running event loop. So the
        process counts as hanging if its event loop is blocked.
        """
        self._beat()
        self._timer = asyncio.get_running_loop().call_later(BEAT, self.beat_in_loop)

    def beat_in_thread(self) -> None:
        """
        Write the bytes in a separate thread. This is for a process whose main thread waits in C
        code for a long time: it counts as hanging only if the whole process does not run.
        """
        threading.Thread(target=self._beat_for_ever, name="tft-pulse", daemon=True).start()

    def _beat_for_ever(self) -> None:
        rest = threading.Event()
        while True:
            self._beat()
            rest.wait(BEAT)

    def _beat(self) -> None:
        # ignore errors: a full pipe also shows that this process lives, and if the parent has
        # ended, this process ends as well
        with suppress(OSError):
            os.write(self._descriptor, BYTE)


class PulseWatch:
    """
    The reading end of the pipe, in the parent of the process that is watched. Create this object
    inside an event loop.

    The function `hangs` is called if the process has written a byte before and then writes nothing
    for `LIMIT` seconds. It is not called again before the process has written another byte. The
    descriptor `reading` is closed when the process has ended, or by the method `close`.
    """

    def __init__(self, reading: int, hangs: Callable[[], None]) -> None:
        os.set_blocking(reading, False)
        self._reading = reading
        self._hangs = hangs
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(reading, self._read)

    def close(self) -> None:
        """
        Stop watching the process, and close the descriptor.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._reading >= 0:
            self._loop.remove_reader(self._reading)
            os.close(self._reading)
            self._reading = -1

    def _read(self) -> bool:
        """
        Read all bytes that have arrived. Return False if there was nothing to read.
        """
        try:
            told = os.read(self._reading, 4096)
        except BlockingIOError:
            return False
        if not told:  # the end of the file: the process has ended
            self.close()
            return True
        if self._timer is not None:
            self._timer.cancel()
        self._await()
        return True

    def _await(self) -> None:
        self._timer = self._loop.call_later(LIMIT, self._late, self._loop.time() + LIMIT)

    def _late(self, due: float) -> None:
        if self._read():
            return  # bytes have arrived that this process has not read, because it did not run
        if self._loop.time() - due > BEAT:
            # this process did not run for a while. Perhaps the watched process did not run either,
            # as in a frozen container: so wait once more before it counts as hanging
            self._await()
            return
        self._timer = None
        self._hangs()
