"""
The peers of the tests of a transfer: sources, destinations, and a tap between them.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

from tft.errors import OrderRefused
from tft.protocol.messages import Source, Transfer
from tft.spi.types import Buffer, ShardPayload
from tft.transfer import Receiver, ShardServer, Tls, fetch

JOB = "job-of-the-test"
STEP = 7
META = b"what the shard is"
ROOT = Path(__file__).resolve().parents[2]

Shard = Mapping[str, bytes]
Disturb = Callable[[int, bytearray], None]
"""A function that gets the position of a piece in the stream and the piece, which it may change in
place."""


class Closable(Protocol):
    """
    An object with a `close` method: a server, a process or a tap.
    """

    def close(self) -> None:
        """
        Release everything.
        """


C = TypeVar("C", bound=Closable)


class Opened(Protocol):
    """
    Registers objects that are closed after the test.
    """

    def __call__(self, thing: C) -> C:
        """
        Register an object, and return it.
        """


def content(size: int, seed: int = 0) -> bytes:
    """
    Return bytes without repetition, which are the same for the same seed.
    """
    return random.Random(seed).randbytes(size)


def serve(shard: Shard, meta: bytes = META, tls: Tls | None = None) -> ShardServer:
    """
    Return a started server that has this shard at STEP.
    """
    payload = ShardPayload(
        meta=meta,
        buffers=tuple(Buffer(name=name, view=memoryview(held)) for name, held in shard.items()),
    )

    def give(name: str, step: int) -> ShardPayload:
        if step != STEP:
            raise OrderRefused(f"rank 5 holds shard {name!r} at step {STEP}, not at step {step}")
        return payload

    server = ShardServer("127.0.0.1", JOB, give, tls)
    server.start()
    return server


class Room:
    """
    The destination of a shard, and a record of the calls.
    """

    def __init__(self, shard: Shard, *, at_take: Callable[[], None] = lambda: None) -> None:
        self.memory = {name: bytearray(len(held)) for name, held in shard.items()}
        self.taken: list[bytes] = []
        self._expected = dict(shard)
        self._at_take = at_take

    def take(self, meta: bytes) -> Sequence[Buffer]:
        """
        Return the buffers, after a call of the function `at_take`, with which a test acts at this
        moment.
        """
        self._at_take()
        return [Buffer(name=name, view=memoryview(here)) for name, here in self.memory.items()]

    def put_to_use(self, meta: bytes) -> None:
        """
        Take over the fetched shard. Every byte must be right by now.
        """
        assert self.whole()
        self.taken.append(meta)

    def whole(self) -> bool:
        """
        Return True if all bytes are equal to those of the sources.
        """
        return self.memory == self._expected


def fetch_into(
    room: Room,
    *addresses: str,
    job: str = JOB,
    step: int = STEP,
    abandoned: threading.Event | None = None,
    patience: float = 5.0,
    tls: Tls | None = None,
) -> dict[int, str]:
    """
    Fetch as rank 9 from sources at these addresses, which are the ranks 0, 1, 2 and so on. Return
    the sources that were lost, with the reasons.
    """
    sources = tuple(Source(rank=rank, address=address) for rank, address in enumerate(addresses))
    return fetch(
        Transfer(shard="model", sources=sources),
        step,
        Receiver(job=job, rank=9, tls=tls),
        room.take,
        room.put_to_use,
        abandoned or threading.Event(),
        patience=patience,
    )


class Process:
    """
    A source in a separate process.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/transfer/serve.py"), JOB, str(size), str(seed)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def kill(self) -> None:
        """
        Kill the process with SIGKILL. Returns when it has ended.
        """
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """
        Stop the process with SIGSTOP. Returns when it is stopped.
        """
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        """
        End the process.
        """
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Tap:
    """
    A connection between a fetch and a source, which can damage bytes or stop forwarding them.
    """

    def __init__(
        self,
        target: str,
        *,
        down: Disturb = lambda position, piece: None,
        up: Disturb = lambda position, piece: None,
    ) -> None:
        self._target = target
        self._down = down
        self._up = up
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._join_ends, name="tap")]
        self._threads[0].start()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def close(self) -> None:
        """
        Close the connection.
        """
        for end in (self._listener, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def _join_ends(self) -> None:
        with suppress(OSError):
            near, _ = self._listener.accept()
            self._ends.append(near)
            host, _, port = self._target.rpartition(":")
            far = socket.create_connection((host, int(port)))
            self._ends.append(far)
            for giving, getting, disturb in ((far, near, self._down), (near, far, self._up)):
                thread = threading.Thread(target=_pass, args=(giving, getting, disturb), name="tap")
                self._threads.append(thread)
                thread.start()


def _pass(giving: socket.socket, getting: socket.socket, disturb: Disturb) -> None:
    position = 0
    with suppress(OSError):
        while piece := bytearray(giving.recv(1 << 16)):
            disturb(position, piece)
            getting.sendall(piece)
            position += len(piece)
    with suppress(OSError):
        getting.shutdown(socket.SHUT_RDWR)


def flip(*positions: int) -> Disturb:
    """
    Return a function that flips a bit of the bytes at these positions of the stream.
    """

    def disturb(position: int, piece: bytearray) -> None:
        for wanted in positions:
            if position <= wanted < position + len(piece):
                piece[wanted - position] ^= 0x10

    return disturb
