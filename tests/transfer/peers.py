"""
The other ends that the tests of a transfer talk to: what is held, where it goes, what lies between.
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
"""Told the position of a piece in the stream, and the piece, which it may change in place."""


class Closable(Protocol):
    """
    A server, a process, a tap.
    """

    def close(self) -> None:
        """Leave nothing behind."""


C = TypeVar("C", bound=Closable)


class Opened(Protocol):
    """
    Takes charge of something: it is closed after the test.
    """

    def __call__(self, thing: C) -> C:
        """The same thing."""


def content(size: int, seed: int = 0) -> bytes:
    """
    Bytes in which no two parts are alike, the same for the same seed.
    """
    return random.Random(seed).randbytes(size)


def serve(shard: Shard, meta: bytes = META, tls: Tls | None = None) -> ShardServer:
    """
    A started server that holds this shard at STEP.
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
    Where a shard goes, and what was said about it.
    """

    def __init__(self, shard: Shard, *, at_take: Callable[[], None] = lambda: None) -> None:
        self.memory = {name: bytearray(len(held)) for name, held in shard.items()}
        self.taken: list[bytes] = []
        self._expected = dict(shard)
        self._at_take = at_take

    def take(self, meta: bytes) -> Sequence[Buffer]:
        """
        The buffers, and whatever the test does at this moment.
        """
        self._at_take()
        return [Buffer(name=name, view=memoryview(here)) for name, here in self.memory.items()]

    def put_to_use(self, meta: bytes) -> None:
        """
        The end of a fetch: by now every byte must be right.
        """
        assert self.whole()
        self.taken.append(meta)

    def whole(self) -> bool:
        """
        All bytes are those that the sources hold.
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
) -> None:
    """
    Fetch from sources at these addresses, which are ranks 0, 1, 2, …; this is rank 9.
    """
    sources = tuple(Source(rank=rank, address=address) for rank, address in enumerate(addresses))
    fetch(
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
    A source that is a process of its own.
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
        SIGKILL; it is gone when this returns.
        """
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """
        SIGSTOP; it does nothing any more when this returns.
        """
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def close(self) -> None:
        """
        Leave nothing behind.
        """
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


class Tap:
    """
    A wire between a fetch and a source: it damages what passes, or stops passing it on.
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
        Cut it.
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
    Flip a bit of the bytes at these positions of the stream.
    """

    def disturb(position: int, piece: bytearray) -> None:
        for wanted in positions:
            if position <= wanted < position + len(piece):
                piece[wanted - position] ^= 0x10

    return disturb
