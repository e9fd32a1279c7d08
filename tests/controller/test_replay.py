"""
Runs judged once more: the same machine commands the same, and where one does not, that is seen.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tft.core.job.commands import Command
from tft.core.job.events import DeadlinePassed, Event, Received
from tft.core.job.machine import Machine
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.protocol.messages import Answered, Check, EndNode, Exited, Noticed, Position
from tft.replay.judging import as_test, replay, replayed, write_story
from tft.replay.recording import Opened, Run, Told, runs_of
from tft.replay.sentences import commanded, plainly
from tft.replay.timeline import timeline
from tft.testing.scripted import ScriptedJob

OPENED = Opened(
    job="job", run="run", world=4, policy=Policy(), checkpoints="/run/checkpoints", resume=None,
    first_incident=1, at=100.0,
)  # fmt: skip


class Listened(Machine):
    """
    A machine whose door is listened at.
    """

    told: list[tuple[Event, list[Command]]]

    def handle(self, event: Event) -> list[Command]:
        """
        As every machine.
        """
        commands = super().handle(event)
        self.told.append((event, commands))
        return commands


def scripted(
    opened: Opened = OPENED, placement: dict[int, tuple[int, ...]] | None = None
) -> tuple[ScriptedJob, Listened]:
    """
    A scripted job with a machine that is listened to.
    """
    job = ScriptedJob(opened.world, policy=opened.policy, placement=placement or {})
    origin = Origin(
        job=opened.job, checkpoints=opened.checkpoints, resume=opened.resume,
        first_incident=opened.first_incident,
    )  # fmt: skip
    machine = Listened(opened.world, opened.policy, origin, at=opened.at)
    machine.told = []
    job.machine = machine
    return job, machine


def recovers(job: ScriptedJob) -> None:
    """
    One dies, and then another while the first is replaced.
    """
    job.train(2)
    job.kill(1)
    job.repeat()
    job.kill(3)
    job.settle()
    job.train(2)
    job.finish()


def retries(job: ScriptedJob) -> None:
    """
    A memory fault, twice.
    """
    job.train(2)
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
        job.train(1)


def hangs(job: ScriptedJob) -> None:
    """
    A rank that answers nothing.
    """
    job.train(1)
    job.ranks[0].hung = True
    job.stall()
    job.settle()
    job.wait()
    job.settle()
    job.train(1)


def is_taken_over(job: ScriptedJob) -> None:
    """
    A controller dies in an incident, and the next one goes on.
    """
    job.train(1)
    job.kill(0)
    job.lead(2)
    job.repeat()
    job.settle()
    job.train(1)


def is_stopped(job: ScriptedJob) -> None:
    """
    SIGTERM.
    """
    job.train(3)
    job.stop()
    job.settle()


def loses_a_node(job: ScriptedJob) -> None:
    """
    A node is gone, and its ranks have no other place.
    """
    job.train(3)
    job.lose_node(1)
    job.settle()


LIVES = [recovers, retries, hangs, is_taken_over, is_stopped, loses_a_node]


def lived(life: Callable[[ScriptedJob], None], path: Path) -> Run:
    """
    The story of a life, written and read back.
    """
    job, machine = scripted(placement={0: (0, 1), 1: (2, 3)})
    life(job.start())
    write_story(path, OPENED, machine.told)
    return runs_of(path.read_bytes(), "s")[1]


@pytest.mark.parametrize("life", LIVES)
def test_the_same_is_commanded_again(life: Callable[[ScriptedJob], None], tmp_path: Path) -> None:
    """
    When a story is judged once more, then each event has the commands it had, and the machine
    stands where it stood.
    """
    run = lived(life, tmp_path / "story.jsonl")
    again = replay(run)

    assert again.differences == []
    assert again.same
    assert len(again.turns) == len(run.told)
    assert all(each.then is not None for each in run.told)
    assert again.incidents
    assert any(turn.commands for turn in again.turns)


@pytest.mark.parametrize("life", LIVES)
def test_a_pasted_story_gives_what_the_story_gave(
    life: Callable[[ScriptedJob], None], tmp_path: Path
) -> None:
    """
    When the run is printed as a test, then that test is short of nothing: it passes as it is.
    """
    judged = replay(lived(life, tmp_path / "story.jsonl"))
    names: dict[str, Callable[[], None]] = {}

    exec(as_test(judged, "test_it"), names)
    names["test_it"]()


def test_little_of_what_ranks_had_captured_is_printed(tmp_path: Path) -> None:
    """
    When a process has ended, or could not save, then of what it told of its own the beginning is
    printed: the rest is long, and nothing is judged by it.
    """
    job, machine = scripted()
    job.start()
    job.train(1)
    state = {1: "0123456789abcdef"}
    position, at = Position(step=1, window=False), job.now
    job.report(
        Exited(
            node=0, rank=1, incarnation=0, code=-9, position=position, stack="", private=state, at=at
        )
    )  # fmt: skip
    job.report(
        Answered(
            rank=2, incarnation=0, incident=1, round=1, order="save", failure="no space left",
            position=position, held=1, private=state, began=at, at=at,
        )
    )  # fmt: skip
    write_story(tmp_path / "s", OPENED, machine.told)
    printed = as_test(replay(runs_of((tmp_path / "s").read_bytes(), "s")[1]), "test_it")
    assert printed.count("01234567") == 2
    assert "012345678" not in printed


def test_a_test_that_expects_something_else_fails(tmp_path: Path) -> None:
    """
    When whoever pastes the test writes there what should have been done, then it fails until it
    is.
    """
    printed = as_test(replay(lived(loses_a_node, tmp_path / "story.jsonl")), "test_it")
    names: dict[str, Callable[[], None]] = {}

    exec(printed.replace("('dump',", "('recover',"), names)
    with pytest.raises(AssertionError):
        names["test_it"]()


def test_nothing_in_a_story_can_end_the_literal_it_is_printed_in(tmp_path: Path) -> None:
    """
    When a text in the story has quotes and backslashes, then it is the same text in the test.
    """
    evil = "''' + \\ \" \n \udc80 '''"
    job, machine = scripted()
    job.start()
    job.train(1)
    job.fault(1, "memory", evil)
    write_story(tmp_path / "s", OPENED, machine.told)
    printed = as_test(replay(runs_of((tmp_path / "s").read_bytes(), "s")[1]), "test_it")

    names: dict[str, str] = {}
    exec(printed, names)
    summaries = [
        turn.told.event.message.summary
        for turn in replayed(names["STORY"]).turns
        if isinstance(turn.told.event, Received) and hasattr(turn.told.event.message, "summary")
    ]
    assert summaries == [evil]


# ---------------------------------------------------------------- what is different


def test_other_limits_are_other_commands(tmp_path: Path) -> None:
    """
    When a run is judged by other limits than its own, then the first difference is where they
    first mattered.
    """
    run = lived(recovers, tmp_path / "story.jsonl")
    other = replace(run, opened=replace(run.opened, policy=Policy(enable=frozenset({"dump"}))))
    judged = replay(other)

    assert not judged.same
    [first, *_] = judged.differences
    assert first.told.then is not None
    assert "Spawn" in first.told.then  # then another process was started, which is not done now
    assert not any(type(command).__name__ == "Spawn" for command in first.commands)


def test_what_is_not_known_is_no_difference(tmp_path: Path) -> None:
    """
    When a story does not say what was commanded, then it is judged and nothing is missed.
    """
    path = tmp_path / "story.jsonl"
    lived(retries, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("then", None)
    judged = replayed("\n".join(json.dumps(line) for line in lines))

    assert judged.same
    assert [strategy for strategy, _, _ in judged.incidents] == ["retry", "retry"]


def test_an_event_the_machine_fails_at_ends_the_replay(tmp_path: Path) -> None:
    """
    When the machine fails at an event, then the replay says where and how. It is the same as then
    if it failed then, and a difference if it did not.
    """
    run = lived(retries, tmp_path / "s")
    line = run.told[-1].line + 1
    order: Any = EndNode(epoch=1, grace=1.0, why="w")  # Any: nobody can report it
    for then, same in ((None, True), ("", False)):
        bad = Told(
            line=line, event=Received(at=1e3, sender="s", number=1, message=order), then=then
        )
        after = Told(line=line + 1, event=DeadlinePassed(at=1e4), then="")
        judged = replay(replace(run, told=(*run.told, bad, after)))

        assert "EndNode" in judged.failure
        assert judged.failed_at == bad
        assert len(judged.turns) == len(run.told)
        assert judged.same is same
        assert f"the machine fails: {judged.failure}" in "".join(timeline(judged))


# ---------------------------------------------------------------- the timeline


def told(life: Callable[[ScriptedJob], None], tmp_path: Path) -> list[str]:
    """
    The lines of a life, without what only stands around them.
    """
    return [line.strip() for line in timeline(replay(lived(life, tmp_path / "story.jsonl")))]


def test_answers_of_many_ranks_are_one_line(tmp_path: Path) -> None:
    """
    When all ranks answer an order, then one line says so, how long the last of them took, and
    where they stand.
    """
    lines = told(retries, tmp_path)

    assert "all 4 ranks froze within 4 ms; standing at step 2" in " | ".join(lines)
    assert sum("froze" in line for line in lines) == 2


def test_ranks_at_different_steps_are_told_apart(tmp_path: Path) -> None:
    """
    When ranks stand at different steps, then the line says who stands where.
    """

    def apart(job: ScriptedJob) -> None:
        job.train(40)
        for rank in (0, 1, 2):
            job.window(rank)
        job.close(0)
        job.kill(3)
        job.settle()

    lines = told(apart, tmp_path)

    assert any(
        line.endswith("standing at step 41 (rank 0), step 40, in the update of step 41 (ranks 1-2)")
        for line in lines
    )


def test_a_choice_has_its_reasons(tmp_path: Path) -> None:
    """
    When a strategy is chosen, then the line says which, and those that were passed over stand
    below, with what spoke against them.
    """
    lines = told(recovers, tmp_path)
    [chosen] = [n for n, line in enumerate(lines) if line.startswith("chosen: recover: ranks [1")]

    assert lines[chosen + 1].startswith("not retry: ranks [1, 3] have lost their process")
    assert "→ ranks 1, 3: copy dense from ranks 0, 2 as of step 2" in lines
    assert any(line.startswith("over: recover, on with step 3, 0 steps lost; it") for line in lines)
    assert any(line.startswith("incident 1, ") and "process at rank 1" in line for line in lines)
    assert lines[-1] == "[ended]"


def test_every_run_is_told_to_its_end(tmp_path: Path) -> None:
    """
    When the state of the job changes, then a line says so: each state it came to is there.
    """
    for number, life in enumerate(LIVES):
        run = lived(life, tmp_path / f"{number}")
        judged = replay(run)
        lines = [line.strip() for line in timeline(judged)]
        came = [t.after.state for t in judged.turns if t.after.state != t.before.state]
        assert [line for line in lines if line.startswith("[")] == [f"[{state}]" for state in came]


def test_an_incident_that_is_not_over_says_so(tmp_path: Path) -> None:
    """
    When the story stops within an incident, then that is its last line.
    """

    def dies(job: ScriptedJob) -> None:
        job.train(1)
        job.kill(1)

    assert told(dies, tmp_path)[-1] == "not over here"


def test_a_message_nobody_put_into_words_is_still_told() -> None:
    """
    When there is no sentence for a message, then its name and fields are shown, short.
    """
    noticed = Noticed(rank=2, kind="straggler", evidence="slow " * 100, at=1.0)
    check = Check(epoch=1, incident=1, round=1, to=(0, 1, 3), incarnations={}, name="digests")

    assert plainly(noticed).startswith("rank 2: Noticed (kind straggler, evidence slow slow")
    assert len(plainly(noticed)) < 160
    assert commanded([check]) == ["check ranks 0-1, 3 (name digests)"]


def test_what_was_said_again_is_told_once(tmp_path: Path) -> None:
    """
    When an answer comes in twice, then it is no second line and does not lengthen the first.
    """
    job, machine = scripted()
    job.start()
    job.train(1)
    _, _, answer, *_ = [e for e, _ in machine.told if "resume" in str(e)]
    late = replace(answer, at=job.now + 5.0)
    path = tmp_path / "story.jsonl"
    write_story(path, OPENED, [*machine.told, (late, [])])
    lines = timeline(replay(runs_of(path.read_bytes(), "s")[1]))

    [line] = [line for line in lines if "entered the loop" in line]
    assert "within 4 ms" in line


def test_the_start_of_a_job_and_its_end_are_told(tmp_path: Path) -> None:
    """
    When a job starts and completes, then both are told outside of any incident.
    """
    lines = told(recovers, tmp_path)

    assert lines[0] == "the job starts"
    assert "→ the job is over: completed, exit code 0: every rank has finished" in lines
    assert lines.index("the job goes on") > lines.index("[freezing]")
