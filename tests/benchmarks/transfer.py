"""
Measure the fetch of a shard against a plain copy through a socket, and print one line of JSON. Run
it with `python tests/benchmarks/transfer.py`. The plain copy (`sendall` to `recv_into`, without
digest and chunks) shows what the kernel can do over loopback. Copies and fetches alternate, so that
other load on the machine affects both. The fetch is also measured with the keys of a job.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import structlog

from tft.keys import make_keys
from tft.protocol.messages import Source, Transfer
from tft.spi.types import Buffer, ShardPayload
from tft.transfer import Receiver, ShardServer, Tls, fetch, read_tls

SIZE = 256 << 20
SMALL = 10_000_000
SMALL_BUFFERS = 150
"""As many as a GPT of 50 tensors has, with the two moments of Adam."""
ROUNDS = 15

JOB = "benchmark"


def main() -> None:
    """
    Measure, and print the line.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    with ExitStack() as stack:
        addresses = [stack.enter_context(_Server("shards")).address for _ in range(2)]
        plain = stack.enter_context(_Server("plain")).address
        curve = Path(stack.enter_context(tempfile.TemporaryDirectory()), "keys")
        make_keys(curve)
        tls = read_tls(curve)
        secret = [stack.enter_context(_Server("shards", str(curve))).address for _ in range(2)]
        room = memoryview(bytearray(SIZE))
        ways: dict[str, Callable[[], None]] = {
            "plain": lambda: _copy(plain, room),
            "one": lambda: _fetch(addresses[:1], "large", room),
            "two": lambda: _fetch(addresses, "large", room),
            "small": lambda: _fetch(addresses[:1], "small", room[:SMALL]),
            "one_encrypted": lambda: _fetch(secret[:1], "large", room, tls),
            "two_encrypted": lambda: _fetch(secret, "large", room, tls),
            "small_encrypted": lambda: _fetch(secret[:1], "small", room[:SMALL], tls),
        }
        for measured in ways.values():  # warm up connections, caches and page tables
            measured()
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(ROUNDS):
            for name, measured in ways.items():
                began = time.perf_counter()
                measured()
                seconds[name].append(time.perf_counter() - began)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    print(
        json.dumps(
            {
                "benchmark": "transfer",
                "cpus": os.cpu_count(),
                "mebibytes": SIZE >> 20,
                "plain_gb_per_s": round(SIZE / median["plain"] / 1e9, 2),
                "one_source_gb_per_s": round(SIZE / median["one"] / 1e9, 2),
                "two_sources_gb_per_s": round(SIZE / median["two"] / 1e9, 2),
                "one_source_to_plain": round(median["plain"] / median["one"], 2),
                "two_sources_to_plain": round(median["plain"] / median["two"], 2),
                "small_bytes": SMALL,
                "small_buffers": SMALL_BUFFERS,
                "small_ms": round(median["small"] * 1e3, 2),
                "one_encrypted_gb_per_s": round(SIZE / median["one_encrypted"] / 1e9, 2),
                "two_encrypted_gb_per_s": round(SIZE / median["two_encrypted"] / 1e9, 2),
                "one_encrypted_to_one": round(median["one"] / median["one_encrypted"], 2),
                "two_encrypted_to_two": round(median["two"] / median["two_encrypted"], 2),
                "small_encrypted_ms": round(median["small_encrypted"] * 1e3, 2),
            }
        )
    )


def _fetch(addresses: Sequence[str], shard: str, room: memoryview, tls: Tls | None = None) -> None:
    fetch(
        Transfer(
            shard=shard,
            sources=tuple(Source(rank=rank, address=at) for rank, at in enumerate(addresses)),
        ),
        1,
        Receiver(job=JOB, rank=9, tls=tls),
        lambda meta: _cut(room, shard),
        lambda meta: None,
        threading.Event(),
    )


def _copy(address: str, room: memoryview) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        at = 0
        while at < len(room):
            at += connection.recv_into(room[at:])


def _cut(whole: memoryview, shard: str) -> tuple[Buffer, ...]:
    count = SMALL_BUFFERS if shard == "small" else 1
    edges = [len(whole) * index // count for index in range(count + 1)]
    return tuple(
        Buffer(name=str(index), view=whole[edges[index] : edges[index + 1]])
        for index in range(count)
    )


# ---------------------------------------------------------------- the other processes


class _Server:
    """
    This file as a server process, which runs until the context is left.
    """

    def __init__(self, *what: str) -> None:
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__, *what],
            env={**os.environ, "PYTHONPATH": str(root)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def __enter__(self) -> "_Server":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()  # `communicate` closes the input of the process, which ends it


def _serve_shards(held: memoryview, curve: Path | None = None) -> None:
    def give(shard: str, step: int) -> ShardPayload:
        part = held[:SMALL] if shard == "small" else held
        return ShardPayload(meta=b"", buffers=_cut(part, shard))

    server = ShardServer("127.0.0.1", JOB, give, read_tls(curve))
    server.start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def _serve_plain(held: memoryview) -> None:
    def copy(listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(held)

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=copy, args=(listener,), daemon=True).start()
    print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["shards"]:
            _serve_shards(memoryview(os.urandom(SIZE)))
        case ["shards", curve]:
            _serve_shards(memoryview(os.urandom(SIZE)), Path(curve))
        case ["plain"]:
            _serve_plain(memoryview(os.urandom(SIZE)))
        case _:
            main()
