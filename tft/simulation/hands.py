"""
The work of a simulated training thread: how the thread carries out orders. Each order takes time.
Some orders need the other ranks. Every order may fail, hang, or be interrupted when the process
ends.
"""

from collections.abc import Iterable, Mapping

from tft.core.rank.protocol import Execute
from tft.protocol.messages import (
    Check,
    Commit,
    Compare,
    Complete,
    End,
    Fetch,
    Load,
    Position,
    Rebuild,
    Regroup,
    Reload,
    Restore,
    Rollback,
    Save,
    SavedFile,
    Stop,
    Transfer,
)
from tft.simulation.loop import faulted, void
from tft.simulation.stage import ProcessPart
from tft.simulation.truth import Content, Written
from tft.simulation.work import Work

ON_DEVICE = (Fetch, Load, Rebuild, Reload, Restore, Rollback, Save)
"""The orders that a rank cannot carry out when its device takes no more work."""
ABANDONED = "TransferFailed: the fetch was abandoned: its order is no longer wanted"


def begin(process: ProcessPart, execute: Execute) -> None:
    """
    Let the training thread of a process begin to carry out an order.
    """
    stage, order = process.stage, execute.order
    stage.checks.invariants.obeyed(process, order)
    if not stage.mishaps.begins(process, execute.name):
        return
    failure = stage.mishaps.failure(process.rank, execute.name)
    if process.collectives.context_lost and isinstance(order, ON_DEVICE):
        failure = "AcceleratorError: the context of the device is lost"
    takes = stage.mishaps.slowness(process.rank, execute.name)
    if failure is None:
        _begin(process, execute, takes)
    else:
        _fail(process, execute, takes, failure)


def _fail(process: ProcessPart, execute: Execute, takes: float, failure: str) -> None:
    """
    Let an order fail with the text `failure`, `takes` seconds from now. A failed fetch or load
    leaves the state of the rank incomplete.
    """
    order = execute.order
    if isinstance(order, Fetch):
        process.memory.torn = True
        _tear(process, [transfer.shard for transfer in order.transfers])
    elif isinstance(order, Load | Reload):
        process.memory.torn = True
        _tear(process, process.memory.content)
    work = Work(local_state=_told(process)) if isinstance(order, Save) else Work()
    process.stage.clock.after(takes + 0.01, process.done, execute, failure, work)


def _begin(process: ProcessPart, execute: Execute, takes: float) -> None:
    """
    Let a training thread begin an order that does not fail at its start. The order takes `takes`
    seconds longer than usual.
    """
    stage, order = process.stage, execute.order
    match order:
        case Stop():
            stage.clock.after(takes + stage.takes(0.002, 0.02), _clear, process, execute)
        case Compare():
            stage.clock.after(takes + stage.takes(0.01, 0.1), _say, process, execute)
        case Regroup():
            stage.clock.after(takes, _regroup, process, execute, order)
        case Rebuild():
            stage.clock.after(takes, _rebuild, process, execute)
        case Fetch():
            ended = process.held() == order.step and not process.steps.tail
            had = dict(process.memory.content) if ended else {}
            fetched = [transfer.shard for transfer in order.transfers]
            whole = process.held() != order.step or process.memory.content.keys() <= set(fetched)
            _tear(process, fetched)
            # the state counts as incomplete, unless the rank holds the state of the order's step
            # already and fetches only some of its shards
            process.memory.torn = whole or process.memory.torn
            stage.clock.after(takes + stage.takes(0.02, 0.4), _fetch, process, execute, order, had)
        case Load():
            process.memory.torn = True
            _tear(process, process.memory.content)
            stage.clock.after(takes + stage.takes(0.02, 0.4), _load, process, execute, order)
        case Reload():
            process.memory.torn = True
            _tear(process, process.memory.content)
            stage.clock.after(takes + stage.takes(0.02, 0.4), _reload, process, execute, order)
        case Restore():
            stage.clock.after(takes + stage.takes(0.01, 0.1), _restore, process, execute, order)
        case Check():
            verdict = stage.mishaps.verdict(process.rank)
            work = Work(verdict=verdict, finding="" if verdict == "pass" else "it looks bad")
            stage.clock.after(takes + stage.takes(0.1, 0.5), process.done, execute, None, work)
        case Rollback():
            stage.clock.after(takes + 0.005, _roll_back, process, execute, order)
        case Save():
            stage.clock.after(takes + stage.takes(0.02, 0.4), _save, process, execute, order)
        case Commit():
            stage.clock.after(takes + stage.takes(0.01, 0.1), _commit, process, execute, order)
        case Complete() | End():
            process.done(execute, None)
            code = order.code if isinstance(order, End) else 0
            stage.clock.after(stage.takes(0.1, 0.3), process.node.ended, process, code)
        case _:
            process.done(execute, f"OrderRefused: {execute.name} is no work for this thread")


def abandon(process: ProcessPart) -> None:
    """
    Interrupt the order in which the training thread hangs. Only a fetch, a regroup or a rebuild can
    be interrupted; for other orders, do nothing.
    """
    task = process.thread.task
    if task is None:
        return
    clock = process.stage.clock
    if isinstance(task.order, Fetch):
        process.memory.torn = True
        clock.after(0.002, process.done, task, ABANDONED)
    elif isinstance(task.order, Regroup | Rebuild):
        process.stage.groups.leave(process)
        clock.after(0.002, process.done, task, "ConnectionError: the group was shut")


def _tear(process: ProcessPart, shards: Iterable[str]) -> None:
    for name in shards:
        process.memory.content[name] = process.stage.truth.wrong()


def _hold(process: ProcessPart, step: int) -> None:
    process.steps.completed = step
    for later in [kept for kept in process.memory.copies if kept > step]:
        del process.memory.copies[later]
    process.steps.window_open = process.memory.torn = process.steps.tail = False
    process.page.move(Position(step=step, window=False), process.node.now)


def _compared(process: ProcessPart) -> Work:
    """
    Return digests of the state that a rank holds, for the comparison with other ranks.
    """
    if process.held() is None or process.collectives.context_lost:
        return Work()
    process.memory.unsaid = False
    digests = {name: content.digests() for name, content in process.memory.content.items()}
    return Work(digests=digests)


def _say(process: ProcessPart, execute: Execute) -> None:
    if process.at_work(execute):
        process.done(execute, None, _compared(process))


def _clear(process: ProcessPart, execute: Execute) -> None:
    if process.at_work(execute):
        if process.group is not None:
            process.group.leave(process, loud=False)
            process.group = None
        process.collectives.cut = True
        if process.steps.interrupted[1] == -1:
            process.steps.interrupted = (process.steps.interrupted[0], execute.order.incident)
        process.done(execute, None, Work(line=process.steps.line if process.steps.tail else ""))


def _regroup(process: ProcessPart, execute: Execute, order: Regroup) -> None:
    if not process.at_work(execute):
        return
    stage = process.stage
    store = (order.host, order.port)
    if not any(node.store.address == store for node in stage.cluster.nodes.values()):
        return process.shut_out("no store listens there")
    stage.groups.join(store, order.name, process, stage.schedule.world - len(order.without))


def _rebuild(process: ProcessPart, execute: Execute) -> None:
    if not process.at_work(execute):
        return
    if process.group is None:
        return process.shut_out("there is no group")
    process.group.build(process)


def _fetch(
    process: ProcessPart, execute: Execute, order: Fetch, had: Mapping[str, Content]
) -> None:
    if not process.at_work(execute):
        return
    for transfer in order.transfers:
        content = _given(process, transfer, order)
        if content is None:
            process.memory.torn = True
            why = f"shard {transfer.shard!r} at step {order.step} could not be fetched whole"
            return process.done(execute, f"TransferFailed: {why}")
        process.stage.checks.auditor.not_put_back(process, transfer.shard, order.step, had, content)
        process.memory.content[transfer.shard] = content
    _hold(process, order.step)
    process.stage.mishaps.harm.miscopied(process)
    process.stage.checks.invariants.repaired_whole(process, order)
    process.done(execute, None, _compared(process))


def _given(process: ProcessPart, transfer: Transfer, order: Fetch) -> Content | None:
    """
    Return the content of a shard from the first source that lives and has the state of the step.
    Return None if there is no such source.
    """
    stage, step = process.stage, order.step
    for source in transfer.sources:
        giver = stage.serving(source.address)
        if giver is None or giver.life.stopped:
            continue
        if giver.collectives.context_lost:
            giver.mail.post(faulted(giver, "process", "Boom: the context is lost"))
            continue
        if giver.held() == step:
            content = giver.memory.content[transfer.shard]
        elif step in giver.backups():
            content = giver.memory.copies[step][transfer.shard]
        else:
            continue
        stage.checks.invariants.given_right(giver, transfer.shard, order, content)
        return content
    return None


def _restore(process: ProcessPart, execute: Execute, order: Restore) -> None:
    if not process.at_work(execute):
        return
    if order.step not in process.backups():
        why = f"OrderRefused: rank {process.rank} keeps no copy of step {order.step}"
        return process.done(execute, why)
    process.memory.content.update(process.memory.copies[order.step])
    _hold(process, order.step)
    process.stage.checks.invariants.repaired_whole(process, order)
    process.done(execute, None, _compared(process))


def _load(process: ProcessPart, execute: Execute, order: Load) -> None:
    if not process.at_work(execute):
        return
    files = process.stage.disk.whole.get(order.directory)
    if order.directory in process.stage.disk.unreadable:
        return process.done(execute, f"CheckpointCorrupt: {order.directory} cannot be read")
    if files is None:
        return process.done(execute, f"CheckpointCorrupt: {order.directory} does not exist")
    if f"local-state-{process.rank}" not in files:
        why = f"CheckpointCorrupt: {order.directory} contains no rank-local state of rank {process.rank}"
        return process.done(execute, why)
    for name in process.memory.content:
        process.memory.content[name] = _shard(files[name])
    process.memory.unsaid = False
    process.page.capture(order.step, _number(files[f"local-state-{process.rank}"]), closed=True)
    _hold(process, order.step)
    process.stage.checks.invariants.repaired_whole(process, order)
    process.done(execute, None)


def _shard(written: Written) -> Content:
    assert isinstance(written, tuple)
    return written


def _number(written: Written) -> int:
    assert not isinstance(written, tuple)
    return int(written)


def _reload(process: ProcessPart, execute: Execute, order: Reload) -> None:
    if not process.at_work(execute):
        return
    if process.group is None:
        return process.shut_out("there is no group to meet the others in")
    stage = process.stage
    step = stage.disk.found(stage.schedule.world, order.not_after)
    if step is None:
        return process.done(execute, "FileNotFoundError: no checkpoint was kept by all")
    kept = stage.disk.own[step][process.rank]
    for name in process.memory.content:
        process.memory.content[name] = _shard(kept[name])
    process.page.capture(step, _number(kept[""]), closed=True)
    _hold(process, step)
    stage.checks.invariants.found(process, order, step)
    process.done(execute, None, _compared(process))


def _local_state(process: ProcessPart, step: int, incident: int) -> int | None:
    captured = process.page.local_states().get(step)
    if captured is not None:
        return captured
    if process.steps.interrupted == (step, incident):
        return process.steps.interrupted_data
    if step == 0:
        process.page.capture(0, 0, closed=True)
        return 0
    return None


def _told(process: ProcessPart) -> dict[int, str]:
    """
    Return the data positions (numbers of batches drawn) that a rank has captured, by step. A rank
    that cannot save reports its data positions, so that another rank can write them.
    """
    return {step: f"{captured:x}" for step, captured in process.page.local_states().items()}


def _roll_back(process: ProcessPart, execute: Execute, order: Rollback) -> None:
    if not process.at_work(execute):
        return
    if process.rank in order.derive:
        data: int | None = process.stage.truth.data(order.step)
    else:
        data = _local_state(process, order.step, order.incident)
        if data is None and process.rank in order.local_state:
            data = int(order.local_state[process.rank], 16)
    if data is not None:
        process.page.capture(order.step, data, closed=True)
    if data is None:
        kept = sorted(process.page.local_states())
        why = f"OrderRefused: no data position of step {order.step} is kept, only of {kept}"
        return process.done(execute, why)
    process.steps.tail = False
    process.page.move(process.steps.position(), process.node.now)
    process.page.forget_after(order.step, (order.incident, order.round))
    if process.stage.schedule.backups:
        process.page.keep(order.step, data, process.memory.copies)
    void(process, order.step)
    for later in [step for step in process.stage.disk.own if step > order.step]:
        del process.stage.disk.own[later]
    process.memory.data = data + order.skip
    process.stage.checks.invariants.rolled_back(process, order.step)
    process.done(execute, None)


def _save(process: ProcessPart, execute: Execute, order: Save) -> None:
    if not process.at_work(execute):
        return
    stage = process.stage
    own = _local_state(process, order.step, order.incident)
    if own is None and order.writes_own:
        why = f"OrderRefused: no data position of step {order.step} is kept"
        return process.done(execute, why)
    files: dict[str, Written] = {name: process.memory.content[name] for name in order.shards}
    if own is not None and order.writes_own:
        files[f"local-state-{process.rank}"] = own
    for rank, local_state in order.local_state.items():
        files[f"local-state-{rank}"] = int(local_state, 16)
    stage.disk.parts.setdefault(order.directory, {}).update(files)
    saved = tuple(SavedFile(name=name, size=1, digest=str(files[name])) for name in files)
    process.done(execute, None, Work(files=saved))


def _commit(process: ProcessPart, execute: Execute, order: Commit) -> None:
    if not process.at_work(execute):
        return
    stage = process.stage
    parts = stage.disk.parts.pop(order.directory, {})
    stage.disk.whole[order.directory] = parts
    stage.checks.invariants.committed_whole(order, parts)
    process.done(execute, None)
