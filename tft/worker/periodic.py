"""
Periodic checkpoints: what a job goes back to when the last copy of a shard is lost.

Every so many steps each rank copies what it is to write, on the training thread, and writes the copy on
a thread of its own. Nobody waits for another: who finds that it was the last to have written its part
makes a checkpoint of all parts. Parts belong together when they were copied after the same order to go
on: what is trained anew after another may not be what it was before.

While the rank is out of the loop nothing is committed. So the controller, which has heard of every
checkpoint there is by the time this rank stands still, can decide which of them count.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pluggy
import structlog

from tft import checkpoint
from tft.clock import SystemClock
from tft.config import RankSettings
from tft.core.comparison import Copy, Difference, differences
from tft.errors import UsageError
from tft.protocol.messages import Checkpointed, CheckpointFailed
from tft.worker.saving import Saving, Write

log = structlog.get_logger()

Digests = dict[str, dict[str, str]]
"""By shard and part."""

_COPYING = 600.0
"""Seconds that copying may take before the training thread is taken for one that hangs."""

_WRITING = 1800.0
"""The same of a function of the user's own, which writes it all."""

_PATIENCE = 1800.0
"""The same of waiting for a disk."""

_CLOSING = 2.0
"""Seconds that the end of the process waits for a write in progress."""

_SLICE = 0.5
"""Seconds after which a training thread that waits for the disk says again that it does not hang."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """
    What this rank writes of one checkpoint.
    """

    step: int
    round: tuple[int, int]
    private: bytes
    writes: Sequence[Write]
    digests: Digests
    """Of what this rank holds, to be compared with what others do."""
    void: bool = False
    """The job went back to an earlier step, and may come another way."""
    committed: bool = False
    """There is a checkpoint of this step, whatever fails afterwards."""


class Periodic:
    """
    Those of one rank. `report` takes the word that one is complete, or will not be, on any thread, and
    what to call when it was heard; `expect` tells that the training thread will not be heard of for so
    many seconds; when `abandoned` is set it is wanted elsewhere.
    """

    def __init__(
        self,
        settings: RankSettings,
        hook: pluggy.HookRelay,
        saving: Saving,
        report: Callable[[Checkpointed | CheckpointFailed, Callable[[], None] | None], None],
        expect: Callable[[float], None],
        abandoned: threading.Event,
        digests: Callable[[], Digests],
    ) -> None:
        self._settings = settings
        self._digests = digests
        self._store = checkpoint.checkpoint_store_of(settings)
        self._every = settings.checkpoint_every
        self._hook = hook
        self._saving = saving
        self._report = report
        self._expect = expect
        self._abandoned = abandoned
        self._turn = threading.Condition()
        self._part: _Part | None = None
        self._round = (0, 0)
        """Incident and round of the order to go on."""
        self._in_loop = False
        self._writer: threading.Thread | None = None
        self._reasons: set[str] = set()
        """Why checkpoints could not be written so far."""
        self._known: queue.SimpleQueue[int] = queue.SimpleQueue()
        """The steps of checkpoints that the controller has heard of: older ones may go."""
        self._owed: int | None = None
        """The step of the checkpoint for which older ones have still to go."""

    # ---------------------------------------------------------------- on the training thread

    def check(self) -> None:
        """
        Raises `UsageError` where there is nobody who could write what was asked for.
        """
        if self._every and not self._saving.own and not self._hook.tft_stage.get_hookimpls():
            raise UsageError(
                f"the adaptor {self._settings.adaptor!r} cannot write periodic checkpoints: leave "
                "--checkpoint-every out"
            )

    def due(self, step: int) -> bool:
        """
        Whether there is to be a checkpoint of this step.
        """
        return bool(self._every) and step % self._every == 0

    def stage(self, step: int, private: bytes) -> None:
        """
        Copy what this rank writes of the checkpoint of `step`, which is whole, and go on. Where the
        one before is still being written that is waited for.
        """
        if not self._comes(lambda: self._part is None):
            return
        self._expect(_WRITING if self._saving.own else _COPYING)
        try:
            writes, digests = self._copies(step), self._digests()
        except Exception as error:  # noqa: BLE001 (no room, say: it is told, and training goes on)
            self._failed(step, error)
            return
        finally:
            self._expect(0.0)
        with self._turn:
            self._part = _Part(
                step=step, round=self._round, private=private, writes=writes, digests=digests
            )
            self._turn.notify_all()
        if self._writer is None:
            self._writer = _begun(self._work, "tft-checkpoints")
            if self._settings.keep_checkpoints:
                _begun(self._retire, "tft-old-checkpoints")

    def _copies(self, step: int) -> list[Write]:
        rank, world = self._settings.rank, self._settings.world
        shards = self._hook.tft_shards(rank=rank, world=world)
        directory = checkpoint.round_of(self._store.place(step), *self._round)
        mine = [copies.shard for copies in shards if rank == min(copies.ranks)]
        writes = [self._saving.stage(directory, shard, step) for shard in mine]
        if self._settings.save_copies == "all":
            place = checkpoint.copy_of(directory, rank)
            others = [copies.shard for copies in shards if rank != min(copies.ranks)]
            writes += [self._further(place, shard, step) for shard in others]
        return writes

    def _further(self, place: Path, shard: str, step: int) -> Write:
        """
        One that another rank writes, too.
        """
        try:
            write = self._saving.stage(place, shard, step)
        except Exception as error:
            log.warning("copy_not_written", shard=shard, why=str(error), exc_info=error)
            return lambda _: ()
        return lambda directory: self._saving.copied(directory / place.name, shard, write)

    def left(self) -> None:
        """
        The rank has left the loop.
        """
        with self._turn:
            self._in_loop = False

    def rolled_back(self, step: int) -> None:
        """
        The job goes on after `step`.
        """
        with self._turn:
            if self._part is not None and self._part.step > step:
                self._part.void = True
                self._turn.notify_all()

    def resumed(self, round_: tuple[int, int]) -> None:
        """
        The rank is in the loop again, by the order of this round of an incident.
        """
        with self._turn:
            self._round, self._in_loop = round_, True
            self._turn.notify_all()

    def finish(self) -> None:
        """
        The last step is done: return when this rank has written what it had to, and has removed what
        that has made old.
        """
        self._comes(lambda: self._part is None and self._owed is None)

    def close(self) -> None:
        """
        The process is about to end, whatever is on its way to the disk.
        """
        with self._turn:
            if self._part is not None:
                self._part.void = True
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._part is None, timeout=_CLOSING)

    def _comes(self, that: Callable[[], bool]) -> bool:
        """
        Wait for the disk; False when the training thread is wanted elsewhere before.
        """
        began, told = time.monotonic(), False
        with self._turn:
            while not self._turn.wait_for(that, timeout=_SLICE):
                if self._abandoned.is_set():
                    return False
                if time.monotonic() - began < _PATIENCE:
                    self._expect(2 * _SLICE)
                if not told:
                    log.warning("disk_slower_than_checkpoints", step=self._part and self._part.step)
                    told = True
        return True

    def _differ(self, found: Sequence[Difference]) -> None:
        """
        Say that what the ranks held is not the same, so that there is no checkpoint of it.
        """
        told = self._settings
        undecided = not all(each.right for each in found)
        wrong = sorted({rank for each in found for rank in each.wrong})
        word = CheckpointFailed(
            rank=told.rank,
            incarnation=told.incarnation,
            step=found[0].step,
            why="; ".join(each.sentence() for each in found),
            wrong=() if undecided else tuple(wrong),
            differ=True,
            at=SystemClock().now(),
        )
        self._report(word, None)

    def _failed(self, step: int, error: BaseException) -> None:
        """
        Say that there is no checkpoint of `step`, on any thread; at length where that is news.
        """
        # without the place of the file, so that a disk that stays full is one reason and not many
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        why = f"{type(error).__name__}: {words}"
        told = self._settings
        word = CheckpointFailed(
            rank=told.rank,
            incarnation=told.incarnation,
            step=step,
            why=why,
            at=SystemClock().now(),
        )
        self._report(word, None)
        if why not in self._reasons:
            self._reasons.add(why)
            with suppress(OSError):  # the log may be on the disk that is full
                log.warning("checkpoint_failed", step=step, why=why, exc_info=error)

    # ---------------------------------------------------------------- on the writing thread

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._part is not None)
            try:
                self._write_it()
            except BaseException:  # the next one is to find a thread that writes
                with suppress(OSError):
                    log.exception("checkpoint_not_told")
            with self._turn:
                self._part = None  # nobody else may hold it: the copy is as large as the state
                self._turn.notify_all()

    def _write_it(self) -> None:
        part = self._part
        assert part is not None
        try:
            self._write(part)
        except BaseException as error:  # not all that fails is an Exception; training goes on
            if part.committed:
                log.warning("checkpoint_aftermath_failed", step=part.step, exc_info=error)
            else:
                self._failed(part.step, error)

    def _write(self, part: _Part) -> None:
        # Who is here has written the one before, and all have who are to write this: of those before
        # that nothing can come any more. On a full disk it may be what is in the way.
        checkpoint.sweep(self._store, part.step - 2 * self._every)
        final = self._store.place(part.step)
        directory = checkpoint.open_round(final, *part.round)
        files = [
            checkpoint.digest_file(directory, name)
            for write in part.writes
            if not part.void
            for name in write(directory)
        ]
        part.writes = ()
        if part.void:
            return
        files.append(checkpoint.write_private(directory, self._settings.rank, part.private))
        done = checkpoint.Part(files=tuple(files), digests=part.digests)
        checkpoint.write_part(directory, self._settings.rank, done)
        parts = checkpoint.claim_parts(directory, self._settings.world)
        if parts is not None:  # else others have still to write theirs, and the last commits
            self._commit(part, directory, final, parts)

    def _commit(
        self, part: _Part, directory: Path, final: Path, parts: Sequence[checkpoint.Part]
    ) -> None:
        told = self._settings
        found = _differences(part.step, parts)
        if found:
            self._differ(found)
            return
        files = [file for each in parts for file in each.files]
        manifest = self._saving.join(
            directory, files, step=part.step, world=told.world, adaptor=told.adaptor
        )
        with self._turn:
            self._turn.wait_for(lambda: self._in_loop or part.void)
            if part.void:
                return
            try:
                self._saving.commit(directory, final, manifest)
            except OSError as error:
                if not checkpoint.is_there(final, manifest):
                    raise
                log.warning("checkpoint_aftermath_failed", step=part.step, exc_info=error)
            part.committed = True
            word = Checkpointed(
                rank=told.rank,
                incarnation=told.incarnation,
                directory=str(final),
                step=part.step,
                compared=all(any(each.digests.values()) for each in parts),
                at=SystemClock().now(),
            )
            self._report(word, partial(self._known.put, part.step))
            self._owed = part.step if told.keep_checkpoints else None
        log.info("checkpointed", step=part.step, directory=str(final))
        checkpoint.sweep(self._store, part.step)

    # ---------------------------------------------------------------- on the thread for what is old

    def _retire(self) -> None:
        while True:
            step = self._known.get()
            try:
                self._make_room(step)
            except Exception:
                log.exception("old_checkpoints_not_removed", step=step)
            with self._turn:
                self._owed = None if self._owed == step else self._owed
                self._turn.notify_all()

    def _make_room(self, step: int) -> None:
        """
        Remove what the checkpoint of `step`, of which the controller knows, has made old. As nothing is
        committed out of the loop, nothing is taken away there either: it may be what all go back to.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._in_loop)
            checkpoint.retire(self._store, self._settings.keep_checkpoints, step)
        checkpoint.sweep(self._store, step)


def _differences(step: int, parts: Sequence[checkpoint.Part]) -> list[Difference]:
    """
    What the ranks, in their order, held of this step and is not the same.
    """
    copies = {
        rank: Copy(rank=rank, step=step, shards=part.digests) for rank, part in enumerate(parts)
    }
    groups: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        for shard in part.digests:
            groups.setdefault(shard, []).append(rank)
    return differences(groups, copies)


def _begun(work: Callable[[], None], name: str) -> threading.Thread:
    """
    A thread that does this for as long as the process lives.
    """
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread
