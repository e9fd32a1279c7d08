"""
A worker that stands still, runs checks, and returns to an earlier copy of its state.

The tests use real processes with the fake adaptor, and act as the controller.
"""

import asyncio
import os
from collections.abc import Callable

from tests.agent.stage import Stage, package
from tests.worker.orders import BOTH, done, enter, key, ordered
from tft import checkpoint
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import (
    Answered,
    Check,
    Exited,
    Faulted,
    Fetch,
    Freeze,
    Hold,
    Joined,
    Position,
    Ready,
    Refused,
    Release,
    Restore,
    Rollback,
    Save,
    Source,
    Stop,
    Trained,
    Transfer,
)

SCRIPT = """
import array, sys
import tft
from tft.testing.adaptor import group

session = tft.init()
rows = open(session.run_dir / f"rows-{session.rank}", "w", buffering=1)


class Numbers:
    def __init__(self):
        self.values = array.array("d", [0.0])
        self.position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def skip(self, batches):
        self.position += batches


def train(session):
    for step in session.steps(100_000):
        numbers.position += 1
        rows.write(f"{session.rank} {step} {numbers.position} {numbers.values[0]}\\n")
        if sys.argv[1:] == [str(session.rank), str(step)]:
            raise tft.TrainingFault("not a number", kind="numeric", polluted=True, not_after=3)
        total = group().add(numbers.position)
        with session.update():
            numbers.values[0] += total


numbers = Numbers()
session.adopt(model=numbers, data=numbers)
session.run(train)
"""

CHECKS = """
from tft.spi import CheckResult, hookimpl

@hookimpl
def tft_check(session, name):
    if name == "lamps":
        verdict = "isolate" if session.rank == 1 else "pass"
        return CheckResult(verdict=verdict, finding=f"lamp {session.rank} at step {session.step}")
    if name == "fuses":
        raise RuntimeError("the fuse box is locked")
    if name == "cables":
        (session.run_dir / f"cables-{session.rank}").read_text()  # until somebody has written
        return CheckResult(verdict="isolate", finding="worn")
"""


async def trains(stage: Stage, *arguments: str, every: int = 1) -> None:
    """
    Start two ranks and bring them into their training loop. `every`: the steps between two copies
    that they keep.
    """
    package(stage.tmp / "packages", "checks", CHECKS, "tft.plugins")
    await stage.agent(SCRIPT, *arguments, nproc=2, adaptor="fake", backup_every=every)
    for rank in BOTH:
        await stage.start(rank=rank)
        await stage.report(Ready, rank=rank)
    await enter(stage, 0, 0)


async def held(stage: Stage, incident: int, *, least: int = 3) -> list[Answered]:
    """
    Order both ranks to stand still after the same step, step `least` or later, and return their
    answers.
    """
    frozen = await done(stage, Freeze(**key(incident), cause="a test"))
    step = max(least, *(answer.position.step + answer.position.window for answer in frozen))
    answers = await done(stage, Hold(**key(incident), step=step))
    assert [answer.position for answer in answers] == [Position(step=step, window=True)] * 2
    assert [answer.held for answer in answers] == [step] * 2
    return answers


async def checking(stage: Stage, incident: int) -> Callable[[], None]:
    """
    Order both ranks to run a check, wait until it has begun, and return a function that ends it.
    """
    doors = [stage.run_dir / f"cables-{rank}" for rank in BOTH]
    for door in doors:
        os.mkfifo(door)
    stage.order(Check(**key(incident), name="cables"))
    # `open` for writing waits until the pipe has a reader, so the check has begun
    pipes = [await asyncio.to_thread(door.open, "w") for door in doors]

    def end() -> None:
        for pipe in pipes:
            pipe.close()

    return end


def rows(stage: Stage, rank: int) -> list[list[str]]:
    """
    Return the rows that a rank has written: rank, step, position of its data, and its number.
    """
    text = (stage.run_dir / f"rows-{rank}").read_text()
    return [line.split() for line in text.split("\n")[:-1]]  # the last line may be half written


async def test_held_ranks_stop_at_one_step_and_continue_from_there(stage: Stage) -> None:
    """When both ranks are held and released twice, then each rank stands at the same step with its
    complete state. It continues in the same groups, and no step is lost or repeated."""
    await trains(stage)
    for incident in (1, 2):
        step = (await held(stage, incident))[0].position.step
        await done(stage, Release(**key(incident)))
        for rank in BOTH:
            await stage.report(Trained, rank=rank, step=step + 1)
    for rank in BOTH:
        steps = [int(row[1]) for row in rows(stage, rank)]
        assert steps == list(range(1, len(steps) + 1))


async def test_check_runs_on_every_rank_and_reports_its_finding(stage: Stage) -> None:
    """When a check is ordered while the ranks stand still, then each rank runs it and answers with
    its finding. A check that raises, or that no plugin has, fails with a sentence."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    found = await done(stage, Check(**key(1), name="lamps"))
    assert [(a.verdict, a.finding) for a in found] == [
        ("pass", f"lamp 0 at step {step + 1}"),
        ("isolate", f"lamp 1 at step {step + 1}"),
    ]
    await done(stage, Release(**key(1)))

    await held(stage, 2)
    failed = await ordered(stage, Check(**key(2), name="fuses"))
    assert [a.failure for a in failed] == ["RuntimeError: the fuse box is locked"] * 2
    await done(stage, Release(**key(2)))

    await held(stage, 3)
    unknown = await ordered(stage, Check(**key(3), name="wires"))
    assert [a.failure for a in unknown] == [
        "OrderRefused: no installed plugin has a check named 'wires'"
    ] * 2


async def test_release_during_a_check_keeps_the_groups(stage: Stage) -> None:
    """When the ranks are released while they run a check, then they answer the release at once. The
    check ends without a report, and training continues in the same groups."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    end = await checking(stage, 1)
    await done(stage, Release(**key(1, round=2)))
    end()
    for rank in BOTH:
        await stage.report(Trained, rank=rank, step=step + 1)
    assert not [r for r in stage.reports if isinstance(r, Faulted)]
    assert not [r for r in stage.reports if isinstance(r, Answered) and r.order == "check"]


async def test_stop_waits_for_the_end_of_a_check(stage: Stage) -> None:
    """When an incident begins during a check, then the freeze is answered at once. The stop is
    answered after the check and the step to be finished, and training continues from there."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    end = await checking(stage, 1)
    frozen = await done(stage, Freeze(**key(2), cause="a test"))
    assert [(a.position, a.waiting) for a in frozen] == [
        (Position(step=step, window=True), True)
    ] * 2
    stage.order(Stop(**key(2), finish=step + 1, grace=60.0))
    end()
    for rank in BOTH:
        stopped = await stage.report(Answered, rank=rank, order="stop", incident=2)
        assert (stopped.failure, stopped.held) == (None, step + 1)
    await enter(stage, 2, step + 1)
    assert not [r for r in stage.reports if isinstance(r, Faulted)]


async def test_late_refusal_of_a_claim_ends_the_process(stage: Stage) -> None:
    """When a rank's claim is not acknowledged, then the rank repeats the claim and waits. When a
    refusal comes later, then its script ends with the reason."""
    stage.acknowledging = False
    await stage.agent(SCRIPT, nproc=1, adaptor="fake")
    await stage.start(rank=0)
    joined = await stage.report(Joined, rank=0)
    for _ in range(2):  # meanwhile the rank repeats its claim and still waits
        await stage.beat()
    stage.order(
        Refused(epoch=1, rank=0, pid=joined.pid, started=joined.started, why="rank 0 is taken")
    )
    exited = await stage.report(Exited, rank=0)
    assert exited.code == 1
    assert "RankTaken: rank 0 is taken" in (stage.run_dir / "logs" / "rank-0.0.log").read_text()
    assert not [r for r in stage.reports if isinstance(r, Ready)]


async def test_rank_restores_a_kept_copy_and_serves_it_to_another_rank(stage: Stage) -> None:
    """When ranks that keep copies stop, then one rank restores its copy of the step before, and the
    other rank fetches this copy. Then both train the step again with the same result. If a skip is
    ordered, both leave out the next batch."""
    await trains(stage)
    address = {rank: (await stage.report(Joined, rank=rank)).address for rank in BOTH}
    step = (await held(stage, 1))[0].position.step
    stopped = await done(stage, Stop(**key(1), finish=step, grace=1.0))
    assert [(a.held, a.backups) for a in stopped] == [(step, (step - 1, step))] * 2

    restored = await done(stage, Restore(**key(1, to=(0,)), step=step - 1))
    assert [(a.held, a.backups) for a in restored] == [(step - 1, (step - 1,))]
    sources = (Source(rank=0, address=address[0]),)
    copied = Transfer(shard="dense", sources=sources)
    await done(stage, Fetch(**key(1, to=(1,)), step=step - 1, transfers=(copied,)))
    await enter(stage, 1, step - 1)
    for rank in BOTH:
        first, again = [row for row in rows(stage, rank) if row[1] == str(step)]
        assert first == again

    step = (await held(stage, 2))[0].position.step
    await done(stage, Stop(**key(2), finish=step, grace=1.0))
    await enter(stage, 2, step, skip=1)
    for rank in BOTH:
        begun, without = [row for row in rows(stage, rank) if row[1] == str(step + 1)][-2:]
        assert int(without[2]) == int(begun[2]) + 1


async def test_copies_of_every_second_step_are_kept_with_their_rank_local_state(
    stage: Stage,
) -> None:
    """When copies are to be kept every second step, then the ranks keep those of the last two even
    steps. They can go back to the older of them, and have their rank-local state of it, though more
    than two steps have passed since."""
    await trains(stage, every=2)
    step = (await held(stage, 1, least=7))[0].position.step
    stopped = await done(stage, Stop(**key(1), finish=step, grace=1.0))
    older, newer = step - step % 2 - 2, step - step % 2
    assert [answer.backups for answer in stopped] == [(older, newer)] * 2
    restored = await done(stage, Restore(**key(1), step=older))
    assert [answer.backups for answer in restored] == [(older,)] * 2
    await enter(stage, 1, older)
    for rank in BOTH:
        first, again = [row for row in rows(stage, rank) if row[1] == str(older + 1)]
        assert first == again


async def test_copies_are_refused_if_the_adaptor_cannot_keep_any(stage: Stage) -> None:
    """When copies in host memory are wanted and the adaptor has no `tft_backup`, then the script
    ends with a sentence that says so."""
    source = "from tft.testing.adaptor import *\ndel tft_backup, tft_backups, tft_restore\n"
    package(stage.tmp / "packages", "forgetful", source, "tft.adaptors")
    await stage.agent(SCRIPT, nproc=1, adaptor="forgetful", backup_every=2)
    await stage.start(rank=0)
    await stage.report(Exited, rank=0)
    found = (stage.run_dir / "logs" / "rank-0.0.log").read_text()
    assert "the adaptor 'forgetful' cannot keep copies of the state in host memory" in found


async def test_captured_state_of_abandoned_steps_is_discarded(stage: Stage) -> None:
    """When ranks have gone back to a step, then they no longer have the RNG state and data position
    of the next step. A rollback to that next step fails."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    await done(stage, Stop(**key(1), finish=step, grace=1.0))
    await done(stage, Restore(**key(1), step=step - 1))
    await done(stage, Rollback(**key(1), step=step - 1, skip=1))
    for answer in await ordered(stage, Rollback(**key(1, round=2), step=step)):
        assert answer.failure is not None
        assert f"has no RNG state and data position of step {step}" in answer.failure


async def test_restore_of_a_step_without_a_copy_is_refused(stage: Stage) -> None:
    """When a rank is ordered to go back to a step of which it keeps no copy, then it answers with a
    failure and keeps its state."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    await done(stage, Stop(**key(1), finish=step, grace=1.0))
    for answer in await ordered(stage, Restore(**key(1), step=step + 1)):
        assert answer.failure is not None
        assert f"keeps no copy of step {step + 1}" in answer.failure
        assert answer.held == step


async def test_fault_report_carries_the_spread_of_the_exception(stage: Stage) -> None:
    """When a `TrainingFault` says how far the fault has spread, then the report of the fault says
    so too."""
    await trains(stage, "1", "5")
    fault = await stage.report(Faulted, rank=1)
    assert (fault.kind, fault.step) == ("numeric", 5)
    assert (fault.polluted, fault.not_after) == (True, 3)


async def test_missing_rank_local_state_is_taken_from_the_order_or_derived(
    stage: Stage,
) -> None:
    """When a rank has captured nothing for the step of a rollback, then it takes the rank-local state
    from the order, derives it if ordered, or refuses. The new state is saved like captured state.
    """
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    await done(stage, Stop(**key(1), finish=step, grace=1.0))
    sent = {1: pack({"position": 5}).hex()}
    left, taken = await ordered(stage, Rollback(**key(1), step=77, local_state=sent))
    assert taken.failure is None
    assert left.failure is not None
    assert "rank 0 has no RNG state and data position of step 77" in left.failure
    await done(stage, Rollback(**key(1, round=2, to=(0,)), step=77, derive=(0,)))

    directory = stage.run_dir / "checkpoints" / "step-77"
    saving = Save(**key(1, round=3), directory=str(directory), step=77, shards=(), local_state={})
    files = [file for answer in await done(stage, saving) for file in answer.files]
    saved = [(checkpoint.partial(directory) / file.name).read_bytes() for file in files]
    saved = [each.partition(b"\n")[2] for each in saved]  # the first line names the rank
    assert [unpack(each) for each in saved] == [{"position": 77}, {"position": 5}]


async def test_rank_local_state_at_a_rollback_is_kept_for_the_next_incident(
    stage: Stage,
) -> None:
    """When ranks were cut off in their all-reduces and are rolled back to the end of that step,
    then their rank-local state is captured. A second rollback to the same step succeeds."""
    await trains(stage, "1", "5")
    await stage.report(Faulted, rank=1)
    await done(stage, Freeze(**key(1), cause="a test"))
    await done(stage, Stop(**key(1), finish=4, grace=1.0))
    await done(stage, Rollback(**key(1), step=5))
    await done(stage, Rollback(**key(2), step=5))


async def test_ranks_roll_back_without_the_file_system_if_no_step_is_given_up(stage: Stage) -> None:
    """When the directory of the checkpoints cannot be read, and no rank has completed a later step,
    then the ranks roll back. If a step is given up, they do not: a later run would continue from a
    checkpoint that was not set aside."""
    await trains(stage, "1", "5")
    await stage.report(Faulted, rank=1)
    await done(stage, Freeze(**key(1), cause="a test"))
    await done(stage, Stop(**key(1), finish=4, grace=1.0))
    (stage.run_dir / "checkpoints").symlink_to("x" * 300)  # `stat` fails, as on a lost mount
    for answer in await ordered(stage, Rollback(**key(1), step=5)):
        assert answer.failure is not None
        assert "File name too long" in answer.failure
    await done(stage, Rollback(**key(1, round=2), step=5, goes_back=False))


async def test_rank_that_cannot_save_sends_its_rank_local_state(stage: Stage) -> None:
    """When a rank cannot write its part of a checkpoint, then its answer carries its rank-local state
    of every kept step. Another rank can then write it."""
    await trains(stage)
    step = (await held(stage, 1))[0].position.step
    await done(stage, Stop(**key(1), finish=step, grace=1.0))
    (stage.run_dir / "taken").touch()
    saving = Save(
        **key(1), directory=str(stage.run_dir / "taken" / "x"), step=step, shards=(), local_state={}
    )
    for answer in await ordered(stage, saving):
        assert answer.failure is not None
        kept = {at: unpack(bytes.fromhex(state)) for at, state in answer.local_state.items()}
        assert kept == {at: {"position": at} for at in kept}
        assert kept.keys() >= {step - 1, step}
