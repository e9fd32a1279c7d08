"""
An adaptor without a framework, for tests. The adaptor uses real processes and real sockets, and a
state of a few numbers. It is installed under the name `fake`.

With this adaptor, all parts of tft except the real adaptors can be tested. A job of four ranks
takes about a second to start. The model is any object with `values`, an `array` of doubles. The
ranks add numbers with `group().add(x)`. Like a collective, this call waits for all ranks, and hangs
if a rank is missing.

By default all ranks hold copies of one shard. If the script calls `session.adopt` with
`apart=True`, each rank has a shard of its own. With `--backup-every`, each rank keeps copies of its
shard at the end of two steps. A function that is adopted as `reload` loads a checkpoint that the
script itself wrote.
"""

import array
import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any, Protocol

import xxhash

from tft.errors import OrderRefused, UsageError
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import FaultKind, ShardCopies
from tft.spi.markers import hookimpl
from tft.spi.types import Buffer, ShardPayload


class Model(Protocol):
    """
    An object that a script can pass to `session.adopt` as the model.
    """

    values: "array.array[float]"


class Group:
    """
    The process group of one rank: the connection to the other ranks through the rendezvous store.
    """

    def __init__(self, name: str, host: str, port: int, world: int) -> None:
        self._name = name
        self._world = world
        self._turn = 0
        self._socket = socket.create_connection((host, port), timeout=10.0)
        self._socket.settimeout(None)
        self._file = self._socket.makefile("rb")

    def add(self, number: float) -> float:
        """
        Send the number of this rank, wait for all ranks, and return the sum of their numbers. The
        sum does not depend on the order in which the numbers arrive.

        Raises `ConnectionError` when the process group is broken.
        """
        # the first call comes from `tft_regroup`, which forms the group: it is not a collective of
        # a step, so do not tell tft about it
        if self._turn:
            _adopted.contributing()
        return self.meet(number)

    def meet(self, number: float = 0.0) -> float:
        """
        Return the sum of the numbers of all ranks, as `add` does, but without telling tft that the
        rank contributes to a collective of the step (see `tft_watch`). Use this method for calls
        that are not part of a step.
        """
        self._turn += 1
        ask = {"key": f"{self._name}/{self._turn}", "world": self._world, "number": number}
        self._socket.sendall(json.dumps(ask).encode() + b"\n")
        answer = self._file.readline()
        if not answer:
            raise ConnectionError("the process group of the fake adaptor is broken")
        return float(json.loads(answer))

    def shut(self) -> None:
        """
        Make the method `add` fail with `ConnectionError` on this rank, both in threads that wait in
        `add` now and in later calls.
        """
        with contextlib.suppress(OSError):  # `shutdown` raises if the connection is shut already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """
        Close the connection of this rank to the store.
        """
        self._file.close()
        self._socket.close()


class Store(socketserver.ThreadingTCPServer):
    """
    The rendezvous store, which adds the numbers that the ranks send under one key. When the number
    of the last rank has arrived, the store answers all ranks with the sum.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__((host, port), _Answer)
        self._sums: dict[str, list[float]] = {}
        self._full = threading.Condition()

    def add(self, key: str, world: int, number: float) -> float:
        """
        Wait until the numbers of `world` ranks have arrived under the key `key`, and return the sum
        of these numbers.
        """
        with self._full:
            numbers = self._sums.setdefault(key, [])
            numbers.append(number)
            self._full.notify_all()
            self._full.wait_for(lambda: len(numbers) >= world)
            return sum(sorted(numbers))


class _Answer(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Store)
        for line in self.rfile:
            ask = json.loads(line)
            answer = self.server.add(ask["key"], ask["world"], ask["number"])
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Adopted:
    """
    The objects that the script of this process has adopted. Each process has one instance.
    """

    model: Model | None = None
    data: Any = None  # Any: an object of the script, with state_dict and load_state_dict
    wrap: Callable[[], Any] | None = None
    apart: bool = False
    """True if each rank has a shard of its own. False: all ranks hold copies of one shard."""
    reload: Callable[[int | None], int] | None = None
    group: Group | None = None
    backups: Mapping[int, "array.array[float]"] = MappingProxyType({})
    """By step: the copy of the state that this rank keeps. Other threads read this mapping, so the
    mapping is replaced as a whole and never changed."""

    def contributing(self) -> None:
        """
        Do nothing. The hook `tft_watch` replaces this method by a function of tft, which must be
        called before the rank contributes to a collective.
        """


_adopted = _Adopted()
_PARTS = {"model", "optimizer", "scheduler", "data", "apart", "reload"}
"""The names under which a script can adopt objects with `session.adopt`, apart from `wrap`."""


def group() -> Group:
    """
    Return the process group that the last call of the hook `tft_regroup` has formed. Raises
    `ConnectionError` if no process group is formed.
    """
    if _adopted.group is None:
        raise ConnectionError("there is no process group: `session.run` forms it")
    return _adopted.group


def _model() -> Model:
    if _adopted.model is None:
        raise UsageError("the fake adaptor has no model: call `session.adopt(model=...)` first")
    return _adopted.model


@hookimpl
def tft_strategies() -> Sequence[str]:
    return ("retry", "recover", "scale_in", "scale_out", "migrate", "dump")


@hookimpl
def tft_preload() -> None:
    return None


@hookimpl
def tft_store(host: str, port: int, opened: Callable[[int], None]) -> None:
    with Store(host, port) as store:
        opened(int(store.server_address[1]))
        store.serve_forever()


@hookimpl
def tft_watch(contributing: Callable[[], None]) -> None:
    _adopted.contributing = contributing  # type: ignore[method-assign] # a process has only one such object


@hookimpl
def tft_adopt(
    parts: Mapping[str, Any],  # Any: objects of the script, of any class
    wrap: Callable[[], Any] | None,
) -> None:
    if "model" not in parts:
        raise UsageError("the fake adaptor needs a model: pass model=..., an object with `values`")
    if unknown := sorted(parts.keys() - _PARTS):
        raise UsageError(
            f"the fake adaptor cannot adopt {unknown[0]!r}: it adopts {', '.join(sorted(_PARTS))}"
        )
    _adopted.model, _adopted.data, _adopted.wrap = parts["model"], parts.get("data"), wrap
    _adopted.apart, _adopted.reload = parts.get("apart", False), parts.get("reload")


@hookimpl
def tft_shards(rank: int, world: int) -> Sequence[ShardCopies]:
    if _adopted.apart:
        return (ShardCopies(shard=f"part.{rank}", ranks=(rank,)),)
    return (ShardCopies(shard="dense", ranks=tuple(range(world))),)


@hookimpl
def tft_pre_update_barrier() -> None:
    group().meet()


@hookimpl
def tft_capture() -> bytes:
    return pack(None if _adopted.data is None else _adopted.data.state_dict())


@hookimpl
def tft_rollback(local_state: bytes, step: int) -> None:
    _adopted.backups = {kept: values for kept, values in _adopted.backups.items() if kept <= step}
    if _adopted.data is not None:
        _adopted.data.load_state_dict(unpack(local_state))


@hookimpl
def tft_skip(batches: int) -> None:
    if not hasattr(_adopted.data, "skip"):
        raise OrderRefused("`data` cannot leave batches out: it has no method skip(batches)")
    _adopted.data.skip(batches)


@hookimpl
def tft_derive(step: int) -> bytes:
    return pack(None if _adopted.data is None else {"position": step})


@hookimpl
def tft_backup(step: int, sound: int, copies: int) -> None:
    kept = {s: values for s, values in _adopted.backups.items() if s < step}
    if len(kept) >= copies and sorted(kept)[1] > sound:
        return
    if len(kept) >= copies:
        del kept[min(kept)]
    _adopted.backups = {**kept, step: array.array("d", _model().values)}


@hookimpl
def tft_backups() -> Sequence[int]:
    return tuple(_adopted.backups)


@hookimpl
def tft_restore(step: int) -> None:
    _model().values[:] = _adopted.backups[step]


@hookimpl
def tft_give(shard: str, step: int, kept: bool) -> ShardPayload:
    view = memoryview(_adopted.backups[step] if kept else _model().values).cast("B")
    return ShardPayload(
        meta=pack({"size": view.nbytes}), buffers=(Buffer(name="values", view=view),)
    )


@hookimpl
def tft_compare(shard: str) -> Mapping[str, str]:
    return {"values": xxhash.xxh3_128_hexdigest(_model().values.tobytes())}


@hookimpl
def tft_take(shard: str, meta: bytes) -> Sequence[Buffer]:
    values = _model().values
    values[:] = array.array("d", bytes(unpack(meta)["size"]))
    return (Buffer(name="values", view=memoryview(values).cast("B")),)


@hookimpl
def tft_taken(shard: str, meta: bytes) -> None:
    return None


@hookimpl
def tft_digests() -> Mapping[str, str]:
    return {
        "parameters": xxhash.xxh3_128_hexdigest(_model().values.tobytes()),
        "data": xxhash.xxh3_128_hexdigest(tft_capture()),
    }


@hookimpl
def tft_quiesce() -> None:
    if _adopted.group is not None:
        _adopted.group.shut()


@hookimpl
def tft_waiting(frame: FrameType) -> bool:
    return frame.f_code.co_filename in (__file__, socket.__file__)


@hookimpl
def tft_clear() -> None:
    if _adopted.group is not None:
        _adopted.group.shut()
        _adopted.group.close()
        _adopted.group = None


@hookimpl
def tft_regroup(name: str, host: str, port: int, rank: int, world: int) -> None:
    _adopted.group = Group(name, host, port, world)
    _adopted.group.add(0.0)


@hookimpl
def tft_rebuild() -> Any:  # Any: the wrapper that the script's function `wrap` returns
    return _model() if _adopted.wrap is None else _adopted.wrap()


@hookimpl
def tft_save(directory: Path, shard: str) -> Sequence[str]:
    return tft_stage(shard)(directory)


@hookimpl
def tft_stage(shard: str) -> Callable[[Path], Sequence[str]]:
    values = _model().values.tobytes()

    def write(directory: Path) -> Sequence[str]:
        name = f"{shard}.bin"
        (directory / name).write_bytes(values)
        return (name,)

    return write


@hookimpl
def tft_load(directory: Path, shard: str) -> None:
    _model().values[:] = array.array("d", (directory / f"{shard}.bin").read_bytes())


@hookimpl
def tft_reload() -> Callable[[int | None], int] | None:
    return _adopted.reload


@hookimpl
def tft_classify(error: BaseException) -> FaultKind | None:
    return "network" if isinstance(error, ConnectionError) else None
