"""
The processes for the tests of an adaptor's contract: ranks that call the hooks of an adaptor as a
worker does, and the rendezvous store.

Each rank has a process of its own, because an adaptor has one training state per process. The main
thread is the training thread, and a second thread is the control thread.
"""

import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

import pluggy

from tft.errors import chain_of
from tft.plugins import load_adaptor
from tft.spi.state import part_digests

LIMIT = 60.0
"""The time in seconds within which the process of a rank must answer a request. If the answer takes
longer, the test fails."""

Update = Callable[[], AbstractContextManager[None]]
"""The type of a function that opens the update window, as `session.update` does."""
Payload = tuple[bytes, list[tuple[str, bytes]]]
"""A shard as it is sent from rank to rank: the bytes `meta`, and the name and content of each
buffer."""


class Training(ABC):
    """
    A small training program with the framework of an adaptor. The author of the adaptor writes this
    class.

    Each rank makes one object in its own process, with the arguments `rank` and `world`. The class
    must be importable by that process, so it cannot be defined inside a function. Its module is
    imported once, before the processes are forked. Let it also import the modules that the
    framework would import later, because then every test is faster. The ranks must draw different
    batches. Otherwise an error in the data position is not noticed.
    """

    adaptor: ClassVar[str]
    """The name of the adaptor's entry point in `tft.adaptors`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank = rank
        self.world = world

    @abstractmethod
    def parts(self) -> Mapping[str, Any]:  # Any: objects of the framework, of any class
        """
        Return the named arguments that the script would give to `session.adopt`. Parameters must be
        the same on every rank, whatever random numbers were drawn before.
        """

    @abstractmethod
    # `Any`, because `model` is the wrapper that `tft_rebuild` has returned, of any framework
    def step(self, model: Any, update: Update) -> object:
        """
        Train one step as the loop of a script does: draw a batch, compute, and change the state
        within `with update():`. Return the results to be compared between runs, such as the loss in
        hexadecimal.
        """

    @abstractmethod
    def damage(self) -> None:
        """
        Change one element of the state that is the same on all ranks, such as a parameter.
        """

    @classmethod
    def hooks(cls) -> pluggy.HookRelay:
        """
        Load the adaptor, and return its hooks (a `HookRelay` of pluggy).
        """
        return load_adaptor(cls.adaptor).hook


class _Rank:
    """
    The requests of a test that the process of a rank carries out on its training thread. Each
    public method is one request.
    """

    def __init__(self, training: type[Training], rank: int, world: int) -> None:
        self.hook = training.hooks()
        self._training = training(rank, world)
        self._rank, self._world = rank, world
        self._model: Any = None  # Any: the framework's wrapper of the model, of any class
        self._completed = 0
        self._local_states: dict[int, bytes] = {}
        self._staged: list[Callable[[Path], Sequence[str]]] = []
        self._copied: Callable[[], None] | None = None

    def adopt(self) -> None:
        """
        Give the objects of the training to the adaptor, as `session.adopt` does.
        """
        self.hook.tft_preload()
        self.hook.tft_watch(contributing=lambda: None, early=True)
        parts = dict(self._training.parts())
        self.hook.tft_adopt(wrap=parts.pop("wrap", None), parts=parts)

    def adopt_more(self) -> str:
        """
        Give the adaptor an object whose name no adaptor knows. Return the name of the exception
        that the adaptor raises, or an empty text if it raises none.
        """
        parts = dict(self._training.parts())
        wrap = parts.pop("wrap", None)
        try:
            self.hook.tft_adopt(wrap=wrap, parts={**parts, "no_adaptor_knows_this": object()})
        except Exception as refusal:  # noqa: BLE001 (the test checks its type)
            return type(refusal).__name__
        return ""

    def form(self, name: str, port: int) -> None:
        """
        Form the process groups through the rendezvous store at `port`, and build the wrapper of the
        model.
        """
        self._regroup(name, port)
        self._model = self.hook.tft_rebuild()

    def form_and_compare(self, name: str, port: int) -> dict[str, dict[str, str]]:
        """
        Form the process groups and build the wrapper, as the method `form` does. Return the digests
        of all shards, which another thread computes while the groups are formed.
        """
        with ThreadPoolExecutor(1) as thread:
            digests = thread.submit(self.all_compared)
            self._regroup(name, port)
        self._model = self.hook.tft_rebuild()
        return digests.result()

    def _regroup(self, name: str, port: int) -> None:
        self.hook.tft_regroup(
            name=name, host="127.0.0.1", port=port, rank=self._rank, world=self._world
        )

    def begin(self) -> None:
        """
        Roll this rank back to step 0, with the rank-local state that it has now. A real job does
        the same after its first process groups are formed.
        """
        self.roll_back(0, self.capture())

    def train(self, last: int) -> list[object]:
        """
        Train up to and including step `last`. Return the results of `Training.step`, one for each
        step.
        """
        told = []
        while self._completed < last:
            told.append(self._training.step(self._model, self._update))
            self._end_step()
        return told

    @contextmanager
    def _update(self) -> Iterator[None]:
        asynchronous = bool(self.hook.tft_asynchronous())
        if asynchronous:
            self.hook.tft_synchronize(closing=False)
        if self._has("tft_opening"):
            self.hook.tft_opening()
        self.hook.tft_capture(closing=False)
        if asynchronous or any(len(each.ranks) < self._world for each in self._shards()):
            self.hook.tft_pre_update_barrier(refuses=None)
        self._await_copy()
        yield
        if asynchronous:
            self.hook.tft_synchronize(closing=True)
        self._completed += 1
        self._local_states[self._completed] = self.hook.tft_capture(closing=True)
        self.hook.tft_updated()

    def _end_step(self) -> None:
        if self._has("tft_end_step"):
            noted = self.hook.tft_end_step(tail=False)
            if noted is not None:
                self._local_states[self._completed] = noted
        if self._has("tft_backup"):
            self._copied = self.hook.tft_backup(
                step=self._completed, sound=self._completed, copies=2
            )

    def _await_copy(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            copied()

    def _has(self, name: str) -> bool:
        return bool(getattr(self.hook, name).get_hookimpls())

    def _shards(self) -> Sequence[Any]:
        shards: Sequence[Any] = self.hook.tft_shards(rank=self._rank, world=self._world)
        return shards

    def interrupted(self) -> str | None:
        """
        Train one more step, which the test interrupts. Return the kind of fault that the adaptor
        assigns to the exception. Return None if the adaptor does not know the exception.

        Raises `AssertionError` when the step ends without an exception.
        """
        try:
            self._training.step(self._model, self._update)
        except Exception as error:  # noqa: BLE001 (the framework may raise anything)
            kinds = [self.hook.tft_classify(error=each) for each in chain_of(error)]
            kind = next((kind for kind in kinds if kind is not None), None)
            return None if kind is None else str(getattr(kind, "kind", kind))
        raise AssertionError("the step was completed, though other ranks did not take part in it")

    def clear(self) -> None:
        """
        Drop the wrapper around the model, and free the process groups.
        """
        self._model = None
        self.hook.tft_clear()

    def damage(self) -> None:
        """
        Damage one element of the state of this rank, as a memory fault would.
        """
        self._training.damage()

    def shards(self) -> dict[str, tuple[int, ...]]:
        """
        Return the holders of each shard of this rank.
        """
        return {each.shard: tuple(each.ranks) for each in self._shards()}

    def compared(self, shard: str) -> dict[str, str]:
        """
        Return the digests of a shard, by the name of the part (such as the parameters).
        """
        if self._has("tft_compare"):
            return dict(self.hook.tft_compare(shard=shard))
        return dict(part_digests(self.hook.tft_give(shard=shard, step=self._completed, kept=False)))

    def all_compared(self) -> dict[str, dict[str, str]]:
        """
        Return the digests of all shards of this rank, by the name of the shard and of the part.
        """
        return {shard: self.compared(shard) for shard in self.shards()}

    def give(self, shard: str, step: int, kept: bool = False) -> Payload:
        """
        Return a copy of a shard of `step`, as it is sent to another rank. With `kept`, return the
        copy that the hook `tft_backup` has made in memory.
        """
        payload = self.hook.tft_give(shard=shard, step=step, kept=kept)
        buffers = [(each.name, bytes(each.view)) for each in payload.buffers]
        return bytes(payload.meta), buffers

    def take(self, shard: str, payload: Payload, step: int) -> None:
        """
        Replace a shard of this rank by the shard of `step` that another rank has given (see the
        method `give`).
        """
        meta, given = payload
        buffers = self.hook.tft_take(shard=shard, meta=meta)
        sizes = [(each.name, each.view.nbytes) for each in buffers]
        expected = [(name, len(content)) for name, content in given]
        assert sizes == expected, (
            f"`tft_take` has made room for the buffers {sizes}, but the giver has sent {expected}"
        )
        for buffer, (_, content) in zip(buffers, given, strict=True):
            buffer.view.cast("B")[:] = content
        self.hook.tft_taken(shard=shard, meta=meta)
        self._completed = step

    def local_state(self, step: int) -> bytes:
        """
        Return the rank-local state that this rank has captured at the end of `step`.
        """
        return self._local_states[step]

    def capture(self) -> bytes:
        """
        Return the present rank-local state of this rank, as the adaptor captures it.
        """
        captured: bytes = self.hook.tft_capture(closing=False)
        return captured

    def roll_back(self, step: int, local_state: bytes | None) -> None:
        """
        Roll this rank back to the end of `step`. `local_state` is the rank-local state that an
        earlier process of the rank has captured. If `local_state` is None, use the state that this
        process has captured.
        """
        state = self._local_states[step] if local_state is None else local_state
        self.hook.tft_rollback(local_state=state, step=step)
        self._completed = step
        self._local_states = {step: state}

    def backups(self) -> list[int] | None:
        """
        Wait until the newest copy is complete, and return the steps of which the adaptor keeps a
        copy. Return None if the adaptor keeps no copies.
        """
        self._await_copy()
        return list(self.hook.tft_backups()) if self._has("tft_backup") else None

    def restore(self, step: int) -> None:
        """
        Restore the state of this rank from the copy of `step` that the adaptor keeps.
        """
        self.hook.tft_restore(step=step)

    def save(self, directory: Path, shards: list[str]) -> list[str]:
        """
        Write shards of this rank into a checkpoint directory. Return the names of the files.
        """
        files: list[str] = []
        for shard in shards:
            files += self.hook.tft_save(
                directory=directory, shard=shard, step=self._completed, shards=shards, attempt=0
            )
        return files

    def stage(self, shards: list[str]) -> None:
        """
        Copy shards in memory. The method `write_staged` writes these copies later.
        """
        self._staged = [self.hook.tft_stage(shard=shard, step=self._completed) for shard in shards]

    def write_staged(self, directory: Path) -> list[str]:
        """
        Write the shards that the method `stage` has copied into a checkpoint directory. Return the
        names of the files.
        """
        return [name for write in self._staged for name in write(directory)]

    def join_files(self, directory: Path, files: list[str]) -> list[str]:
        """
        Join the written shards into one checkpoint. Return the names of the files that were added.
        """
        if not self._has("tft_join"):
            return []
        return list(self.hook.tft_join(directory=directory, files=files, step=self._completed))

    def stages(self) -> bool:
        """
        Return True if the adaptor can write a checkpoint while training continues.
        """
        return self._has("tft_stage")

    def load(self, directory: Path, step: int) -> None:
        """
        Load all shards of this rank from a checkpoint of `step`.
        """
        for shard in self.shards():
            self.hook.tft_load(directory=directory, shard=shard)
        self._completed = step

    def digests(self) -> dict[str, str]:
        """
        Return the digests of the whole state of this rank, by the name of the part.
        """
        return dict(self.hook.tft_digests())


def _serve_rank(pipe: Connection, training: type[Training], rank: int, world: int) -> None:
    """
    Serve the requests of a rank until the process is killed. The control thread serves the requests
    `quiesce` and `is_waiting` at once. The main thread serves all other requests, one after the
    other.
    """
    served = _Rank(training, rank, world)
    main = threading.main_thread().ident
    assert main is not None
    waiting: queue.SimpleQueue[tuple[str, tuple[object, ...]]] = queue.SimpleQueue()
    answering = threading.Lock()

    def answer(name: str, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        try:
            told: tuple[str, object, str] = (name, function(*arguments), "")
        except Exception:  # noqa: BLE001 (the test shows the traceback)
            told = (name, None, traceback.format_exc())
        with answering:
            pipe.send(told)

    def is_waiting() -> bool:
        return bool(served.hook.tft_waiting(frame=sys._current_frames()[main]))

    def control() -> None:
        while True:
            try:
                name, arguments = pipe.recv()
            except EOFError:
                os._exit(0)
            if name == "quiesce":
                answer(name, served.hook.tft_quiesce, ())
            elif name == "is_waiting":
                answer(name, is_waiting, ())
            else:
                waiting.put((name, arguments))

    threading.Thread(target=control, daemon=True).start()
    while True:
        name, arguments = waiting.get()
        answer(name, getattr(served, name), arguments)


def _serve_store(pipe: Connection, training: type[Training]) -> None:
    training.hooks().tft_store(host="127.0.0.1", port=0, opened=pipe.send)


class RankProcess:
    """
    The process of one rank, to which a test sends requests.
    """

    def __init__(
        self, context: ForkServerContext, training: type[Training], rank: int, world: int
    ) -> None:
        self.rank = rank
        self._pipe, there = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=_serve_rank, args=(there, training, rank, world), daemon=True
        )
        self._process.start()
        there.close()
        self._answers: dict[str, tuple[object, str]] = {}

    def tell(self, name: str, *arguments: object) -> None:
        """
        Send a request to the rank without waiting for the answer. `name` is a method of `_Rank`,
        `quiesce` or `is_waiting`.
        """
        self._pipe.send((name, arguments))

    def hear(self, name: str) -> Any:  # Any: each kind of request has its own type of answer
        """
        Return the answer to the request `name`, which was sent before. Raises `AssertionError` when
        the request failed, or when there is no answer within `LIMIT` seconds.
        """
        while name not in self._answers:
            if not self._pipe.poll(LIMIT):
                raise AssertionError(f"rank {self.rank} has not done `{name}` in {LIMIT:.0f} s")
            try:
                told, result, failure = self._pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {self.rank} has ended during `{name}`") from None
            self._answers[told] = (result, failure)
        result, failure = self._answers.pop(name)
        if failure:
            raise AssertionError(f"rank {self.rank} could not do `{name}`:\n{failure}")
        return result

    # `Any`, because each kind of request has its own type of answer
    def ask(self, name: str, *arguments: object) -> Any:
        """
        Send a request to the rank, and wait for its answer (see `tell` and `hear`).
        """
        self.tell(name, *arguments)
        return self.hear(name)

    def kill(self) -> None:
        """
        End the process of the rank with SIGKILL.
        """
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()
        self._pipe.close()


class Ranks:
    """
    The ranks of one job, and their rendezvous store, as a context manager that ends all processes.

    With `formed`, the ranks form their process groups when the context begins.
    """

    def __init__(self, training: type[Training], world: int, *, formed: bool = False) -> None:
        self._training = training
        self._world = world
        self._context = multiprocessing.get_context("forkserver")
        # this preload works only for the first job of a test run: later jobs use the same fork
        # server, which runs already
        self._context.set_forkserver_preload([__name__, training.__module__])
        self._formed = formed
        self._groups = 0
        self._ranks: list[RankProcess] = []

    def __enter__(self) -> Self:
        here, there = self._context.Pipe()
        self._store = self._context.Process(
            target=_serve_store, args=(there, self._training), daemon=True
        )
        self._store.start()
        try:
            assert here.poll(LIMIT), f"`tft_store` has not called `opened` in {LIMIT:.0f} s"
            self._port = here.recv()
            self._ranks = [self._start(rank) for rank in range(self._world)]
            self._begin()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _begin(self) -> None:
        self.all("adopt")
        if self._formed:
            self.form()
            self.all("begin")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for rank in self._ranks:
            rank.kill()
        self._store.kill()
        self._store.join()

    def __getitem__(self, rank: int) -> RankProcess:
        return self._ranks[rank]

    def __iter__(self) -> Iterator[RankProcess]:
        return iter(self._ranks)

    def _start(self, rank: int) -> RankProcess:
        return RankProcess(self._context, self._training, rank, self._world)

    # `Any`, because each kind of request has its own type of answer
    def all(self, name: str, *arguments: object) -> list[Any]:
        """
        Send a request to all ranks at once, and return their answers in the order of the ranks.
        """
        for rank in self._ranks:
            rank.tell(name, *arguments)
        return [rank.hear(name) for rank in self._ranks]

    def form(self) -> None:
        """
        Form the process groups of all ranks, under a name that no earlier group had.
        """
        self._groups += 1
        self.all("form", f"contract-{self._groups}", self._port)

    def form_and_compare(self) -> list[dict[str, dict[str, str]]]:
        """
        Form the process groups of all ranks, as the method `form` does. Return the digests of the
        shards of each rank, which the rank computes meanwhile.
        """
        self._groups += 1
        return self.all("form_and_compare", f"contract-{self._groups}", self._port)

    def replace(self, rank: int) -> None:
        """
        Kill the process of a rank, and start another process for the rank.
        """
        self._ranks[rank].kill()
        self._ranks[rank] = self._start(rank)
        self._ranks[rank].ask("adopt")

    def copy(self, rank: int, step: int, *, kept: bool = False) -> None:
        """
        Let a rank take each of its shards from another rank that holds the shard. With `kept`, the
        other rank gives the copy of `step` that it keeps, instead of its present state.
        """
        for shard, holders in self._ranks[rank].ask("shards").items():
            source = next(holder for holder in holders if holder != rank)
            payload = self._ranks[source].ask("give", shard, step, kept)
            self._ranks[rank].ask("take", shard, payload, step)
