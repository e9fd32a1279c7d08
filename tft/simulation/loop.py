"""
The training loop of a simulated training thread: forward, all-reduces, update window and tail,
repeated until an order or an exception makes the thread leave the loop.
"""

from collections import Counter
from collections.abc import Mapping

from tft.core.link.slice_comparison import CONTRIBUTION
from tft.core.rank.protocol import Execute
from tft.protocol.messages import (
    Checkpointed,
    CheckpointFailed,
    Faulted,
    FaultKind,
    Finished,
    Position,
    SliceDigest,
    Trained,
)
from tft.simulation.stage import ProcessPart
from tft.simulation.truth import Digests, Written

SLOW_DISK = 0.8
"""Virtual seconds that a slow disk takes to write a checkpoint. The ranks train several steps in
this time."""


def enter(process: ProcessPart, execute: Execute) -> None:
    """
    Let a training thread enter the training loop at the agreed step, as a resume order asks.
    """
    stage = process.stage
    stage.checks.invariants.obeyed(process, execute.order)
    if not stage.mishaps.begins(process, "resume"):
        return
    stage.begun = process.steps.announce = True
    process.steps.attempt = (execute.order.incident, execute.order.round)
    process.page.training = True
    process.page.moved = process.node.now
    process.thread.phase = "forward"
    process.tell_done(execute, None)
    stage.checks.invariants.resumes_right(process, execute.order)
    if process.steps.completed >= stage.schedule.steps:
        _finish(process)
    elif process.group is None or process.collectives.cut:
        fault(process, "network", "there is no group")
    else:
        process.group.enter([process], process.steps.completed + 1)


def forward(process: ProcessPart, step: int) -> None:
    """
    Capture the data position of `step` (the number of batches drawn) at the end of the forward
    pass. So another node can receive the position before this rank contributes to the all-reduces.
    """
    process.page.capture(step, process.memory.data + 1, closed=False)


def contribute(process: ProcessPart, step: int) -> None:
    """
    Contribute to the all-reduces of `step`. From now on the other ranks can finish the step without
    this rank.
    """
    process.thread.phase = "all-reduce"
    process.collectives.summed = False
    process.memory.data += 1
    process.page.capture(step, process.memory.data, closed=False)
    if process.stage.schedule.slices:
        models = [(content.model, content.spread) for content in process.memory.content.values()]
        process.collectives.contributed = _number(
            (process.rank, step, process.memory.data, *models)
        )


def open_window(process: ProcessPart, step: int) -> bool:
    """
    Open the update window after the all-reduces. Return True when the thread changes the state.
    Return False when the thread must wait at the step gate (where orders hold a rank before an
    update), or when an injected fault stops it.
    """
    process.steps.window_open = True
    process.page.move(Position(step=step - 1, window=True), process.node.now)
    if step > process.steps.lock:
        process.thread.phase = "gate"
        process.handle(process.standing())
        process.look_at_gate()
        return False
    process.thread.phase = "window"
    return process.stage.mishaps.reached(process, step, "window")


def close_window(process: ProcessPart, step: int) -> bool:
    """
    Finish the update of `step`. Return True when the thread stays in the loop.
    """
    stage = process.stage
    _update(process, step)
    process.steps.completed = step
    process.steps.window_open = False
    process.steps.tail = stage.schedule.tail > 0
    process.steps.line = "train.py:10"
    now = process.node.now
    process.page.capture(step, process.memory.data, closed=True)
    process.page.move(process.steps.position(), now)
    if not process.steps.tail:
        _ends(process, step)
    stage.checks.invariants.trained(process, step)
    if process.steps.announce:
        process.steps.announce = False
        process.mail.post(
            Trained(rank=process.rank, incarnation=process.incarnation, step=step, at=now)
        )
    if not process.steps.tail:
        _keep(process, step)
    if not stage.mishaps.reached(process, step, "between"):
        return False
    return process.steps.tail or _goes_on(process, step)


def _update(process: ProcessPart, step: int) -> None:
    truth, content = process.stage.truth, process.memory.content
    for name, held in content.items():
        before, after = truth.value(step - 1, name), truth.stages(step, name)[0]
        if process.collectives.spoilt:
            content[name] = truth.spoilt(step)
        elif held.spoilt and not held.flipped:
            content[name] = truth.wrong()
        else:
            moved = truth.goes_on(held, before, after, step)
            content[name] = moved.used(process.collectives.wrong_gradients)


# ---------------------------------------------------------------- the tail


def begin_tail(process: ProcessPart, step: int) -> bool:
    """
    Begin the tail of `step` (the part after the update window). Return True unless an injected
    fault stops the thread.
    """
    process.thread.phase = "tail"
    return process.stage.mishaps.reached(process, step, "tail")


def schedule_settings(process: ProcessPart, step: int) -> None:
    """
    Advance the settings of all shards, as a learning-rate scheduler does.
    """
    _proceed(process, step, 0)
    process.steps.line = "train.py:20"


def average(process: ProcessPart, step: int) -> bool:
    """
    Apply the result of the collective in the tail (the part of a step after the update window) to
    the state. Return True when the thread stays in the loop.
    """
    process.thread.phase = "tail"
    _proceed(process, step, 1)
    process.steps.line = "train.py:40"
    return process.stage.mishaps.reached(process, step, "averaged")


def end_step(process: ProcessPart, step: int) -> bool:
    """
    End `step` and ask for the next step. Return True when the thread enters the next step.
    """
    process.steps.tail = False
    process.steps.line = ""
    process.page.move(process.steps.position(), process.node.now)
    _ends(process, step)
    process.stage.checks.invariants.ended_step(process, step)
    _keep(process, step)
    return process.stage.mishaps.reached(process, step, "end") and _goes_on(process, step)


def _proceed(process: ProcessPart, step: int, stage: int) -> None:
    truth, content = process.stage.truth, process.memory.content
    for name, held in content.items():
        stages = truth.stages(step, name)
        content[name] = truth.goes_on(held, stages[stage], stages[stage + 1], step)


def _ends(process: ProcessPart, step: int) -> None:
    """
    Do what the schedule asks for at the end of a step: keep a copy of the state and drop the oldest
    copy, and post the digests of a slice (a part of each shard).
    """
    backups = process.stage.schedule.backups
    if backups:
        process.memory.copies[step] = dict(process.memory.content)
        process.memory.copies.pop(step - backups - 1, None)
        process.page.keep(step, process.memory.data, process.memory.copies)
    if process.stage.schedule.slices:
        _post(process, step)


def _post(process: ProcessPart, step: int) -> None:
    """
    Write two kinds of digests to the page of the rank (its shared memory): the digest of what the
    rank has contributed to the all-reduces of the step, and the digests of one slice of each of its
    shards.
    """
    stage, of = process.stage, process.stage.schedule.slices
    incident, round_ = process.steps.attempt
    number = step % of
    bad = stage.pollution.step is not None and step >= stage.pollution.step
    digests = [(CONTRIBUTION, 0, process.collectives.contributed)]
    for shard, (name, content) in enumerate(process.memory.content.items()):
        # after a polluted update all ranks hold the same wrong numbers, so post digests that are
        # equal on all ranks
        shown = None if bad else stage.truth.slice_of(content, name, step, number)
        digests.append((number, shard, _number((number, shown))))
    process.page.digests.extend(
        SliceDigest(
            incident=incident, round=round_, step=step, number=which, of=of, shard=shard,
            digest=digest,
        )
        for which, shard, digest in digests
    )  # fmt: skip
    stage.checks.auditor.digested(process, step)


def _number(things: object) -> int:
    """
    Return the hash of `things` as an unsigned number of 64 bits. The simulation uses this number as
    a digest.
    """
    return hash(things) % (1 << 64)


def _keep(process: ProcessPart, step: int) -> None:
    """
    Write the checkpoints that are due at the end of `step`. One kind is the periodic checkpoint of
    the job. The other kind is written by each rank on its own and not reported.
    """
    stage = process.stage
    if stage.schedule.checkpoints and not step % stage.schedule.checkpoints:
        _checkpoint(process, step)
    if stage.schedule.own and not step % stage.schedule.own:
        kept: dict[str, Written] = {**process.memory.content, "": float(process.memory.data)}
        stage.disk.own.setdefault(step, {})[process.rank] = kept


def _goes_on(process: ProcessPart, step: int) -> bool:
    if step >= process.steps.leave_after:
        leave(process, None)
        return False
    if step >= process.stage.schedule.steps:
        _finish(process)
        return False
    return True


def _checkpoint(process: ProcessPart, step: int) -> None:
    """
    Write this rank's part of a periodic checkpoint. The last rank to write starts the commit. For
    every third checkpoint, one rank finds the disk full and reports the failure instead.
    """
    stage, disk = process.stage, process.stage.disk
    if process.group is None or process.collectives.cut:
        return  # the process group is broken, so this rank writes no checkpoint
    members = process.group.members
    number = step // stage.schedule.checkpoints
    if number % 3 == 2 and process.rank == number % max(1, len(members)):
        process.mail.post(
            CheckpointFailed(
                rank=process.rank, incarnation=process.incarnation, step=step, why="no room",
                at=process.node.now,
            )
        )  # fmt: skip
        return
    directory = f"/run/checkpoints/periodic-{step}"
    parts = disk.parts.setdefault(directory, {})
    parts.update(process.memory.content)
    parts[f"local-state-{process.rank}"] = process.memory.data
    digests = {name: content.digests() for name, content in process.memory.content.items()}
    disk.copies.setdefault(directory, {})[process.rank] = digests
    if all(f"local-state-{rank}" in parts for rank in members):
        # Every third checkpoint is slow, so that its result is reported in a later step or during
        # an incident.
        stage.clock.after(SLOW_DISK * (number % 3 == 0), _commit, process, directory, step)


def void(process: ProcessPart, step: int) -> None:
    """
    Remove unfinished periodic checkpoints of steps later than `step`, because the job continues
    from the end of `step`.
    """
    disk = process.stage.disk
    for directory in list(disk.copies):
        if int(directory.rpartition("-")[2]) > step:
            disk.parts.pop(directory, None)
            del disk.copies[directory]


def _commit(process: ProcessPart, directory: str, step: int) -> None:
    """
    Commit a periodic checkpoint once all parts are written, if the copies of each shard are equal.
    If copies differ, report a failed checkpoint. A rank commits a checkpoint only while it is in
    the training loop; outside the loop, try again after `SLOW_DISK` seconds.
    """
    disk, now = process.stage.disk, process.node.now
    if directory not in disk.copies or not process.life.alive:
        return
    wrong = _wrong(disk.copies[directory])
    if wrong is None and not process.page.training:
        process.stage.clock.after(SLOW_DISK, _commit, process, directory, step)
        return
    parts = disk.parts.pop(directory)
    del disk.copies[directory]
    if wrong is None:
        disk.whole[directory] = parts
        process.mail.post(
            Checkpointed(
                rank=process.rank, incarnation=process.incarnation, directory=directory, step=step,
                compared=True, at=now,
            )
        )  # fmt: skip
        return
    process.mail.post(
        CheckpointFailed(
            rank=process.rank, incarnation=process.incarnation, step=step, differ=True,
            why=f"ranks {wrong} hold other copies", wrong=wrong, at=now,
        )
    )  # fmt: skip


def _wrong(copies: Mapping[int, Digests]) -> tuple[int, ...] | None:
    """
    Return the ranks whose copy of a shard differs from the majority of the copies. `copies` holds
    the digests of each rank. Return an empty tuple when the copies of a shard differ and no
    majority exists. Return None when all copies are equal.
    """
    wrong: set[int] = set()
    decided = True
    for shard in {name for held in copies.values() for name in held}:
        held = {rank: tuple(c[shard].items()) for rank, c in copies.items() if shard in c}
        (best, most), *others = Counter(held.values()).most_common()
        if others:
            decided = decided and most > max(1, others[0][1])
            wrong |= {rank for rank, content in held.items() if content != best}
    if not wrong:
        return None
    return tuple(sorted(wrong)) if decided else ()


def fault(process: ProcessPart, kind: FaultKind, text: str, *, polluted: bool = False) -> None:
    """
    Let the training thread leave its loop with an exception, and report the fault. `text` is the
    text of the exception. `polluted` is True if wrong numbers may have spread to other ranks.
    """
    leave(process, faulted(process, kind, text, polluted=polluted))


def faulted(process: ProcessPart, kind: FaultKind, text: str, *, polluted: bool = False) -> Faulted:
    """
    Return the report of an exception in a rank. `text` is the text of the exception.
    """
    return Faulted(
        rank=process.rank, incarnation=process.incarnation, kind=kind,
        step=process.steps.completed + 1, summary=text, traceback=f"Traceback\n{text}",
        position=process.steps.position(), polluted=polluted, context_lost=process.collectives.context_lost,
        at=process.node.now,
    )  # fmt: skip


def _finish(process: ProcessPart) -> None:
    leave(
        process,
        Finished(
            rank=process.rank, incarnation=process.incarnation, step=process.steps.completed,
            sliced=bool(process.stage.schedule.slices), at=process.node.now,
        ),
    )  # fmt: skip


def leave(process: ProcessPart, message: Faulted | Finished | None) -> None:
    """
    Let the training thread start to leave the loop. When the thread has left, post `message`.
    Without a message, the thread leaves because of an order.
    """
    process.thread.phase = "leaving"
    if not isinstance(message, Finished):
        process.steps.interrupted = (process.steps.completed + 1, -1)
        process.steps.interrupted_data = process.memory.data
    process.stage.clock.after(0.0002, _left, process, message)


def _left(process: ProcessPart, message: Faulted | Finished | None) -> None:
    if not process.life.alive or process.thread.stuck:
        return
    process.page.training = False
    if message is not None:
        process.mail.post(message)
    process.left()
