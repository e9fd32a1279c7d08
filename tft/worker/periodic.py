"""
Periodic checkpoints, from which a job continues when all copies of a shard are lost.

Every N steps each rank copies its part of the checkpoint in memory, on the training thread. A
second thread writes the copy to disk. No rank waits for another rank. The rank whose part is
written last commits all parts as one checkpoint.

Parts are combined only if they were copied after the same RESUME order (the end of an incident).
After a later RESUME order the same step may be computed again, with another result.

A rank commits nothing while it is outside the loop. So when all ranks have stopped, the controller
knows every checkpoint that exists, and can decide which of them are valid.
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
from tft.core.job.comparison import Copy, Difference, differences
from tft.errors import UsageError
from tft.logs import quiet_log
from tft.protocol.messages import Checkpointed, CheckpointFailed
from tft.worker.saving import Saving, Write

log = structlog.get_logger()

Digests = dict[str, dict[str, str]]
"""Maps each shard and each part of the shard to a digest."""

_COPYING = 600.0
"""The time in seconds that the copy in memory may take before the training thread counts as
hanging."""

_WRITING = 1800.0
"""Seconds that the user's own save function may take before the training thread counts as hanging.
The time is long, because this function writes whole shards to disk."""

_PATIENCE = 1800.0
"""Seconds that the training thread may wait for the disk (until a checkpoint is written, or old
checkpoints are removed) before it counts as hanging."""

_CLOSING = 2.0
"""Seconds that the process, before it ends, waits for a checkpoint that is being written."""

_SLICE = 0.5
"""The time in seconds between two signs of life (`expect`) of a training thread that waits for the
disk."""


Report = Callable[[Checkpointed | CheckpointFailed, Callable[[], None] | None], None]
"""A function that sends a report to the controller. The second argument is a function, or None: it
is called when the controller has acknowledged the report."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Part:
    """
    The part of one periodic checkpoint that this rank writes.
    """

    step: int
    round: tuple[int, int]
    local_state: bytes
    writes: Sequence[Write]
    digests: Digests
    """Digests of the state that this rank holds, to be compared with the digests of other ranks."""
    void: bool = False
    """True if this part must not be committed: the job has returned to an earlier step and may
    compute this step with another result, or the process is about to end."""
    committed: bool = False
    """True if the checkpoint of this step exists. A failure after that is only logged, and not
    reported as a failed checkpoint."""


class _Reports:
    """
    The reports of this rank about periodic checkpoints. All methods may be called on any thread.
    """

    def __init__(self, settings: RankSettings, report: Report) -> None:
        self._settings = settings
        self._report = report
        self._reasons: set[str] = set()
        """The reasons of failed checkpoints that were already logged."""

    def complete(
        self, step: int, directory: Path, *, compared: bool, heard: Callable[[], None]
    ) -> None:
        """
        Report that the checkpoint of `step` is complete. `heard` is called when the controller has
        acknowledged the report. `compared` is True if the copies of all ranks were compared.
        """
        word = Checkpointed(
            rank=self._settings.rank,
            incarnation=self._settings.incarnation,
            directory=str(directory),
            step=step,
            compared=compared,
            at=SystemClock().now(),
        )
        self._report(word, heard)

    def differ(self, found: Sequence[Difference]) -> None:
        """
        Report that copies of a shard differed between ranks, so that no checkpoint of this step was
        committed.
        """
        undecided = not all(each.right for each in found)
        wrong = sorted({rank for each in found for rank in each.wrong})
        word = CheckpointFailed(
            rank=self._settings.rank,
            incarnation=self._settings.incarnation,
            step=found[0].step,
            why="; ".join(each.sentence() for each in found),
            wrong=() if undecided else tuple(wrong),
            differ=True,
            unsliced=any(each.unsliced for each in found),
            at=SystemClock().now(),
        )
        self._report(word, None)

    def failed(self, step: int, error: BaseException) -> None:
        """
        Report that there is no checkpoint of `step`. Log each new reason in detail.
        """
        # leave out the path of the file: while the disk is full, all failures must have the same
        # reason, so that the reason is logged only once
        words = error.strerror if isinstance(error, OSError) and error.strerror else error
        why = f"{type(error).__name__}: {words}"
        word = CheckpointFailed(
            rank=self._settings.rank,
            incarnation=self._settings.incarnation,
            step=step,
            why=why,
            at=SystemClock().now(),
        )
        self._report(word, None)
        if why not in self._reasons:
            self._reasons.add(why)
            with suppress(OSError):  # the log may be on the same full disk
                log.warning("checkpoint_failed", step=step, why=why, exc_info=error)


class Periodic:
    """
    The periodic checkpoints of one rank.

    `report(message, heard)` reports that a checkpoint is complete or has failed; it may be called
    on any thread, and calls `heard` when the report is acknowledged. `expect(seconds)` announces
    that the training thread will show no progress for this time. `abandoned` is set when the
    training thread must stop waiting, because it must take part in an incident. `digests` returns
    digests of the training state, by shard and part.
    """

    def __init__(
        self,
        settings: RankSettings,
        hook: pluggy.HookRelay,
        saving: Saving,
        report: Report,
        expect: Callable[[float], None],
        abandoned: threading.Event,
        digests: Callable[[], Digests],
    ) -> None:
        self._settings = settings
        self._digests = digests
        self._hook = hook
        self._saving = saving
        self._reports = _Reports(settings, report)
        self._expect = expect
        self._abandoned = abandoned
        self._turn = threading.Condition()
        self._part: _Part | None = None
        self._round = (0, 0)
        """The incident and the round (attempt) of the last order to resume training."""
        self._staged = (0, self._round)
        """The last step whose state was copied for a checkpoint, and the value that `_round` had
        then."""
        self._in_loop = False
        self._threads: set[str] = set()
        """The names of the threads that were started, so that no thread is started twice."""
        self._known: queue.SimpleQueue[int] = queue.SimpleQueue()
        """A queue for the thread that removes old checkpoints. It has the steps of checkpoints that
        this rank has committed and the controller has acknowledged. The thread takes each step out
        of the queue, and then removes older checkpoints."""
        self._owed: int | None = None
        """The step of the newest checkpoint that this rank has committed, while older checkpoints
        are still to be removed. None: nothing is to be removed."""

    @property
    def _store(self) -> checkpoint.CheckpointStore:
        return checkpoint.checkpoint_store_of(self._settings)

    # ---------------------------------------------------------------- on the training thread

    def check(self) -> None:
        """
        Check that the periodic checkpoints that the settings ask for can be written.

        Raises `UsageError` if neither the adaptor nor the user's functions can write them.
        """
        if (
            self._settings.checkpoint_every
            and not self._saving.own
            and not self._hook.tft_stage.get_hookimpls()
        ):
            raise UsageError(
                f"the adaptor {self._settings.adaptor!r} cannot write periodic checkpoints: start "
                "the job without --checkpoint-every, or give session.adopt your own save and load"
            )

    def due(self, step: int) -> bool:
        """
        Return True if a periodic checkpoint of this step must be written.
        """
        return bool(self._settings.checkpoint_every) and step % self._settings.checkpoint_every == 0

    def stage(self, step: int, local_state: bytes) -> None:
        """
        Copy this rank's part of the checkpoint of `step`, and let the writing thread write it.

        The state of `step` must be complete. `local_state` is the rank-local state at the end of
        `step`. Waits first while the part of the previous checkpoint is still being written. If the
        copy fails, the failure is reported, and training goes on.
        """
        if not self._comes(lambda: self._part is None):
            return
        self._staged = (step, self._round)
        try:
            self._start_threads()
        except RuntimeError as error:
            # not raised: the next checkpoint tries to start the threads again
            self._reports.failed(step, error)
            return
        self._expect(_WRITING if self._saving.own else _COPYING)
        try:
            writes, digests = self._copies(step), self._digests()
        except Exception as error:  # noqa: BLE001 (it is reported, and training goes on)
            self._reports.failed(step, error)
            return
        finally:
            self._expect(0.0)
        with self._turn:
            self._part = _Part(
                step=step,
                round=self._round,
                local_state=local_state,
                writes=writes,
                digests=digests,
            )
            self._turn.notify_all()

    def _start_threads(self) -> None:
        """
        Start the threads that write checkpoints and remove old checkpoints, if they do not run yet.

        Raises `RuntimeError` if the system has no more threads. Call this before a part is handed
        over: `finish` would wait forever for a part that no thread writes.
        """
        works = {"tft-checkpoints": self._work}
        if self._settings.keep_checkpoints:
            works["tft-old-checkpoints"] = self._retire
        for name, work in works.items():
            if name not in self._threads:
                threading.Thread(target=work, name=name, daemon=True).start()
                self._threads.add(name)

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
        Copy a shard that another rank writes too, and return the function that writes this second
        copy to disk. If the copy fails, log it and return a function that writes nothing.
        """
        try:
            write = self._saving.stage(place, shard, step)
        except Exception as error:
            log.warning("copy_not_written", shard=shard, why=str(error), exc_info=error)
            return lambda _: ()
        return lambda directory: self._saving.copied(directory / place.name, shard, write)

    def left(self) -> None:
        """
        Record that the rank has left the training loop. Until it is in the loop again, this rank
        commits no checkpoint.
        """
        with self._turn:
            self._in_loop = False

    def rolled_back(self, step: int) -> None:
        """
        Record that the job continues from the end of `step`. A part of a later step that was copied
        before must not be committed.
        """
        with self._turn:
            if self._part is not None and self._part.step > step:
                self._part.void = True
                self._turn.notify_all()

    def resumed(self, round_: tuple[int, int]) -> None:
        """
        Record that the rank is in the loop again. `round_` is the incident and the round of the
        RESUME order.
        """
        with self._turn:
            self._round, self._in_loop = round_, True
            self._turn.notify_all()

    def finish(self, step: int, local_state: bytes | None) -> None:
        """
        Wait, after the last step, until this rank has written its part of the last checkpoint and
        has removed old checkpoints.

        `step` is the last step, and `local_state` the rank-local state at its end. If a rank was
        lost while it wrote its part of the checkpoint of this step, all ranks write their parts
        again, because no later checkpoint will follow.
        """
        if (
            local_state is not None
            and self.due(step)
            and self._staged != (step, self._round)
            and self._comes(lambda: self._part is None)
            and not checkpoint.has(self._store, step)
        ):
            self.stage(step, local_state)
        self._comes(lambda: self._part is None and self._owed is None)

    def close(self) -> None:
        """
        Give up a write in progress, because the process is about to end. Waits at most `_CLOSING`
        seconds.
        """
        with self._turn:
            if self._part is not None:
                self._part.void = True
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._part is None, timeout=_CLOSING)

    def _comes(self, that: Callable[[], bool]) -> bool:
        """
        Wait until the condition `that` is true, and return True. There is no time limit here,
        because the disk may be slow, but after `_PATIENCE` seconds the thread counts as hanging. If
        an incident needs the training thread first, return False.
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

    # ---------------------------------------------------------------- on the writing thread

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._part is not None)
            try:
                self._write_it()
            # catch everything, because the thread must go on to write the next checkpoint
            except BaseException:
                with suppress(OSError):
                    log.exception("checkpoint_not_told")
            with self._turn:
                # `_part` must be the last reference to the copy, which is as large as the state:
                # now the copy is freed
                self._part = None
                self._turn.notify_all()

    def _write_it(self) -> None:
        part = self._part
        assert part is not None
        try:
            self._write(part)
        # `BaseException`, because no failure of a checkpoint may end training
        except BaseException as error:
            if part.committed:
                log.warning("checkpoint_aftermath_failed", step=part.step, exc_info=error)
            else:
                self._reports.failed(part.step, error)

    def _write(self, part: _Part) -> None:
        # All ranks have begun the previous checkpoint, because no rank can be a whole step behind
        # another. A rank begins a checkpoint only when it has written its part of the checkpoint
        # before. So no rank still writes the checkpoint of two intervals ago, or an older
        # checkpoint. Remove those that are unfinished, because they may have filled the disk.
        checkpoint.sweep(self._store, part.step - 2 * self._settings.checkpoint_every)
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
        files.append(checkpoint.write_local_state(directory, self._settings.rank, part.local_state))
        done = checkpoint.CheckpointPart(files=tuple(files), digests=part.digests)
        checkpoint.write_part(directory, self._settings.rank, done)
        parts = checkpoint.claim_parts(directory, self._settings.world)
        # `parts` is None if some rank has not written its part yet: the rank that writes its part
        # last commits the checkpoint
        if parts is not None:
            self._commit(part, directory, final, parts)

    def _commit(
        self, part: _Part, directory: Path, final: Path, parts: Sequence[checkpoint.CheckpointPart]
    ) -> None:
        told = self._settings
        found = _differences(part.step, parts)
        if found:
            self._reports.differ(found)
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
            compared = all(any(each.digests.values()) for each in parts)
            heard = partial(self._known.put, part.step)
            self._reports.complete(part.step, final, compared=compared, heard=heard)
            self._owed = part.step if told.keep_checkpoints else None
        quiet_log.info("checkpointed", step=part.step, directory=str(final))
        checkpoint.sweep(self._store, part.step)

    # ---------------------------------------------------------------- on the thread that removes old checkpoints

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
        Remove old checkpoints beyond the number to keep, now that the checkpoint of `step` exists.

        The controller must have acknowledged the checkpoint of `step`. Nothing is removed while
        this rank is outside the loop: in an incident all ranks may return to an old checkpoint.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._in_loop)
            checkpoint.retire(self._store, self._settings.keep_checkpoints, step)
        checkpoint.sweep(self._store, step)


def _differences(step: int, parts: Sequence[checkpoint.CheckpointPart]) -> list[Difference]:
    """
    Return the differences between the copies of shards that the ranks held at this step. The list
    is empty if all copies are equal.

    `parts` has one part for each rank, in the order of the ranks.
    """
    copies = {
        rank: Copy(rank=rank, step=step, shards=part.digests) for rank, part in enumerate(parts)
    }
    groups: dict[str, list[int]] = {}
    for rank, part in enumerate(parts):
        for shard in part.digests:
            groups.setdefault(shard, []).append(rank)
    return differences(groups, copies)
