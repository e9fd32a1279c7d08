"""
The replay of recorded runs: the same machine gives the same commands, and differences are found.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tft.core.job.commands import Command
from tft.core.job.events import DeadlinePassed, Event, Led, Received
from tft.core.job.machine import Machine
from tft.core.job.origin import Origin
from tft.core.job.policy import Policy
from tft.core.job.transitions import State
from tft.protocol.messages import Answered, Check, EndNode, Exited, Noticed, Position
from tft.replay.judging import as_test, replay, replayed, write_story
from tft.replay.recording import Opened, Run, StoryEvent, runs_of
from tft.replay.sentences import commanded, plainly
from tft.replay.timeline import timeline
from tft.testing.scripted import ScriptedJob

OPENED = Opened(
    job="job", run="run", world=4, policy=Policy(), checkpoints="/run/checkpoints", resume=None,
    first_incident=1, at=100.0,
)  # fmt: skip


class Listened(Machine):
    """
    A job machine that records its events and commands.
    """

    told: list[tuple[Event, list[Command]]]

    def handle(self, event: Event) -> list[Command]:
        """
        Handle an event, and record it with its commands.
        """
        commands = super().handle(event)
        self.told.append((event, commands))
        return commands


def scripted(
    opened: Opened = OPENED, placement: dict[int, tuple[int, ...]] | None = None
) -> tuple[ScriptedJob, Listened]:
    """
    Return a scripted job whose machine records.
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
    Kill a rank, and then another one while the first is replaced.
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
    Report a memory fault twice.
    """
    job.train(2)
    for _ in range(2):
        job.fault(2, "memory")
        job.settle()
        job.train(1)


def hangs(job: ScriptedJob) -> None:
    """
    Let a rank answer nothing.
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
    Lose the controller in an incident, and let the next one continue.
    """
    job.train(1)
    job.kill(0)
    job.lead(2)
    job.repeat()
    job.settle()
    job.train(1)


def is_stopped(job: ScriptedJob) -> None:
    """
    Stop the job as by SIGTERM.
    """
    job.train(3)
    job.stop()
    job.settle()


def loses_a_node(job: ScriptedJob) -> None:
    """
    Lose a node whose ranks have no other place.
    """
    job.train(3)
    job.lose_node(1)
    job.settle()


LIVES = [recovers, retries, hangs, is_taken_over, is_stopped, loses_a_node]


def lived(life: Callable[[ScriptedJob], None], path: Path) -> Run:
    """
    Run the scripted job `life`, and return its story, written and read again.
    """
    job, machine = scripted(placement={0: (0, 1), 1: (2, 3)})
    life(job.start())
    write_story(path, OPENED, machine.told)
    return runs_of(path.read_bytes(), "s")[1]


@pytest.mark.parametrize("life", LIVES)
def test_replay_gives_the_same_commands(
    life: Callable[[ScriptedJob], None], tmp_path: Path
) -> None:
    """When a story is replayed, then each event gives the commands that were recorded, and the
    replay has no differences."""
    run = lived(life, tmp_path / "story.jsonl")
    again = replay(run)

    assert again.differences == []
    assert again.same
    assert len(again.turns) == len(run.events)
    assert all(each.then is not None for each in run.events)
    assert again.incidents
    assert any(turn.commands for turn in again.turns)


@pytest.mark.parametrize("life", LIVES)
def test_story_without_one_of_its_events_can_be_continued(
    life: Callable[[ScriptedJob], None], tmp_path: Path
) -> None:
    """When any one event of a story is lost, then the machine takes the others, and a new leader
    freezes the ranks or ends the job."""
    run = lived(life, tmp_path / "story.jsonl")
    events = [each.event for each in run.events][: 2 * len(run.events) // 3]
    for lost in range(len(events)):
        machine = run.opened.machine()
        for event in events[:lost] + events[lost + 1 :]:
            machine.handle(event)
        machine.handle(Led(at=events[-1].at, epoch=9, lost=1))
        machine.check()
        assert machine.state in (State.FREEZING, State.EXITING, State.ENDED)


@pytest.mark.parametrize("life", LIVES)
def test_story_printed_as_a_test_passes(
    life: Callable[[ScriptedJob], None], tmp_path: Path
) -> None:
    """When a run is printed as a test, then this test is complete and passes without changes."""
    judged = replay(lived(life, tmp_path / "story.jsonl"))
    names: dict[str, Callable[[], None]] = {}

    exec(as_test(judged, "test_it"), names)
    names["test_it"]()


def test_printed_test_shortens_the_rank_local_state_of_ranks(tmp_path: Path) -> None:
    """When a process has ended or could not save, then the printed test has only the beginning of
    its rank-local state. No decision depends on the rest."""
    job, machine = scripted()
    job.start()
    job.train(1)
    state = {1: "0123456789abcdef"}
    position, at = Position(step=1, window=False), job.now
    job.report(
        Exited(
            node=0, rank=1, incarnation=0, code=-9, position=position, stack="", local_state=state, at=at
        )
    )  # fmt: skip
    job.report(
        Answered(
            rank=2, incarnation=0, incident=1, round=1, order="save", failure="no space left",
            position=position, held=1, local_state=state, began=at, at=at,
        )
    )  # fmt: skip
    write_story(tmp_path / "s", OPENED, machine.told)
    printed = as_test(replay(runs_of((tmp_path / "s").read_bytes(), "s")[1]), "test_it")
    assert printed.count("01234567") == 2
    assert "012345678" not in printed


def test_printed_test_with_another_expectation_fails(tmp_path: Path) -> None:
    """When the expected strategy in the printed test is changed, then the test fails."""
    printed = as_test(replay(lived(loses_a_node, tmp_path / "story.jsonl")), "test_it")
    names: dict[str, Callable[[], None]] = {}

    exec(printed.replace("('dump',", "('recover',"), names)
    with pytest.raises(AssertionError):
        names["test_it"]()


def test_quotes_and_backslashes_of_a_story_survive_in_the_printed_test(tmp_path: Path) -> None:
    """When a text in the story has quotes and backslashes, then the printed test has the same text."""
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
        turn.recorded.event.message.summary
        for turn in replayed(names["STORY"]).turns
        if isinstance(turn.recorded.event, Received)
        and hasattr(turn.recorded.event.message, "summary")
    ]
    assert summaries == [evil]


# ---------------------------------------------------------------- differences


def test_replay_with_another_policy_shows_the_first_difference(tmp_path: Path) -> None:
    """When a run is replayed with another policy, then the first difference is the event at which
    the policy first mattered."""
    run = lived(recovers, tmp_path / "story.jsonl")
    other = replace(run, opened=replace(run.opened, policy=Policy(enable=frozenset({"dump"}))))
    judged = replay(other)

    assert not judged.same
    [first, *_] = judged.differences
    assert first.recorded.then is not None
    # the recorded run started another process; the replay does not
    assert "Spawn" in first.recorded.then
    assert not any(type(command).__name__ == "Spawn" for command in first.commands)


def test_story_without_recorded_commands_gives_no_difference(tmp_path: Path) -> None:
    """When a story does not have the recorded commands, then it is replayed without differences."""
    path = tmp_path / "story.jsonl"
    lived(retries, path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line.pop("then", None)
    judged = replayed("\n".join(json.dumps(line) for line in lines))

    assert judged.same
    assert [strategy for strategy, _, _ in judged.incidents] == ["retry", "retry"]


def test_event_that_makes_the_machine_fail_ends_the_replay(tmp_path: Path) -> None:
    """When the machine fails at an event, then the replay says where and why. It is a difference
    only if the machine did not fail at this event in the recorded run."""
    run = lived(retries, tmp_path / "s")
    line = run.events[-1].line + 1
    # Any: `Received` has no such message, because only controllers send it
    order: Any = EndNode(epoch=1, grace=1.0, why="w")
    for then, same in ((None, True), ("", False)):
        bad = StoryEvent(
            line=line, event=Received(at=1e3, sender="s", number=1, message=order), then=then
        )
        after = StoryEvent(line=line + 1, event=DeadlinePassed(at=1e4), then="")
        judged = replay(replace(run, events=(*run.events, bad, after)))

        assert "EndNode" in judged.failure
        assert judged.failed_at == bad
        assert len(judged.turns) == len(run.events)
        assert judged.same is same
        assert f"the machine fails: {judged.failure}" in "".join(timeline(judged))


# ---------------------------------------------------------------- the timeline


def told(life: Callable[[ScriptedJob], None], tmp_path: Path) -> list[str]:
    """
    Return the lines of the timeline of `life`, without the frame around them.
    """
    return [line.strip() for line in timeline(replay(lived(life, tmp_path / "story.jsonl")))]


def test_answers_of_all_ranks_are_one_line_of_the_timeline(tmp_path: Path) -> None:
    """When all ranks answer an order, then one line says so, with the time of the last answer and
    the step of the ranks."""
    lines = told(retries, tmp_path)

    assert "all 4 ranks froze within 4 ms; standing at step 2" in " | ".join(lines)
    assert sum("froze" in line for line in lines) == 2


def test_timeline_lists_ranks_at_different_steps(tmp_path: Path) -> None:
    """When ranks stand at different steps, then the line says which ranks stand at which step."""

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


def test_timeline_gives_the_reasons_of_a_choice(tmp_path: Path) -> None:
    """When a strategy is chosen, then the line names it. The lines below name the strategies that
    were not chosen, with the reasons."""
    lines = told(recovers, tmp_path)
    [chosen] = [n for n, line in enumerate(lines) if line.startswith("chosen: recover: ranks [1")]

    assert lines[chosen + 1].startswith("not retry: ranks [1, 3] have lost their process")
    assert "→ ranks 1, 3: copy dense from ranks 0, 2 as of step 2" in lines
    assert any(line.startswith("over: recover, on with step 3, 0 steps lost; it") for line in lines)
    assert any(line.startswith("incident 1, ") and "process at rank 1" in line for line in lines)
    assert lines[-1] == "[ended]"


def test_timeline_shows_every_state_of_the_job(tmp_path: Path) -> None:
    """When the state of the job changes, then the timeline has a line for the new state."""
    for number, life in enumerate(LIVES):
        run = lived(life, tmp_path / f"{number}")
        judged = replay(run)
        lines = [line.strip() for line in timeline(judged)]
        came = [t.after.state for t in judged.turns if t.after.state != t.before.state]
        assert [line for line in lines if line.startswith("[")] == [f"[{state}]" for state in came]


def test_timeline_marks_an_incident_that_is_not_over(tmp_path: Path) -> None:
    """When the story ends during an incident, then the last line says that the incident is not
    over."""

    def dies(job: ScriptedJob) -> None:
        job.train(1)
        job.kill(1)

    assert told(dies, tmp_path)[-1] == "not over here"


def test_message_without_a_sentence_is_shown_by_name_and_fields() -> None:
    """When there is no sentence for a message, then its name and its shortened fields are shown."""
    noticed = Noticed(rank=2, kind="straggler", evidence="slow " * 100, at=1.0)
    check = Check(epoch=1, incident=1, round=1, to=(0, 1, 3), incarnations={}, name="digests")

    assert plainly(noticed).startswith("rank 2: Noticed (kind straggler, evidence slow slow")
    assert len(plainly(noticed)) < 160
    assert commanded([check]) == ["check ranks 0-1, 3 (name digests)"]


def test_repeated_answer_is_shown_once(tmp_path: Path) -> None:
    """When an answer comes twice, then it adds no second line and does not change the time in the
    first line."""
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


def test_timeline_shows_the_start_and_end_of_a_job(tmp_path: Path) -> None:
    """When a job starts and completes, then the timeline shows both outside of any incident."""
    lines = told(recovers, tmp_path)

    assert lines[0] == "the job starts"
    assert "→ the job is over: completed, exit code 0: every rank has finished" in lines
    assert lines.index("the job goes on") > lines.index("[freezing]")
