"""
What loops do behind their update windows, and a rank that dies there or elsewhere: nothing that there is of the state
at the end is, on any rank, another than that of the undisturbed job; or the report says where it may be.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "tails_job.py"
REPLICATED = ("weights", "optimizer", "scheduler", "modes", "rates", "schedule", "scale", "trained")
"""What is the same on all ranks; `scaler`, too, where there is one."""

Calm = Callable[..., Outcome]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """
    The undisturbed job of a habit, run once.
    """
    known: dict[tuple[str, ...], Outcome] = {}

    def undisturbed(*arguments: str, nproc: int = 3) -> Outcome:
        key = (*arguments, str(nproc))
        if key not in known:
            where = tmp_path_factory.mktemp("calm") / "run"
            known[key] = run(where, script=SCRIPT, arguments=arguments, nproc=nproc)
            assert known[key].code == 0, known[key].output
        return known[key]

    return undisturbed


def disturbed(where: Path, *arguments: str, nproc: int = 3, chaos: tuple[str, ...] = ()) -> Outcome:
    """
    The job with these faults, which ends well.
    """
    options = [word for spec in chaos for word in ("--chaos", spec)]
    outcome = run(where, *options, script=SCRIPT, arguments=arguments, nproc=nproc)
    assert outcome.code == 0, outcome.output
    return outcome


def never_silent(outcome: Outcome, calm: Outcome) -> None:
    """
    Everything is what it is in the undisturbed job; or an incident says that it is not, and where in the script
    that comes from, and all ranks have the same of what they share.
    """
    inexact = [sentence for incident in outcome.incidents for sentence in incident["inexact"]]
    finals = outcome.finals()
    for name in (*REPLICATED, "averaged", "scaler"):
        assert len({final.get(name) for final in finals.values()}) == 1, (name, finals)
    if not inexact:
        identical(outcome, calm)
        assert evaluations(outcome) == evaluations(calm)
    for sentence in inexact:
        assert "cut off in the tail of step" in sentence
        assert "tails_job.py:" in sentence
        line = int(sentence.partition("tails_job.py:")[2].split(",")[0])
        assert line in lines_of_tails()


def evaluations(outcome: Outcome) -> dict[str, list[str]]:
    """
    What each rank has written down of its evaluations.
    """
    found = outcome.run_dir.glob("records-rank*.jsonl")
    return {path.name: path.read_text().splitlines() for path in found}


def lines_of_tails() -> set[int]:
    """
    The lines of the script's loop behind its window.
    """
    text = SCRIPT.read_text().splitlines()
    first = text.index('        come("window", step)') + 1
    return set(range(first, text.index('        come("tail", step)') + 2))


def gone(outcome: Outcome) -> list[tuple[int, Mapping[str, Any]]]:  # Any: JSON
    """
    The ranks whose processes were killed, and where their pages say that they stood.
    """
    story = [
        json.loads(line) for line in (outcome.run_dir / "story.jsonl").read_text().splitlines()
    ]
    exits = [event["body"] for event in story if event["kind"] == "Exited"]
    return [(each["rank"], each["position"]) for each in exits if each["code"] == -9]


def trail(outcome: Outcome, rank: int, incarnation: int = 0) -> list[str]:
    """
    Where a process has come to.
    """
    return (outcome.run_dir / f"trail-rank{rank}.{incarnation}").read_text().splitlines()


# ---------------------------------------------------------------- the phase


def test_a_victim_of_phase_tail_has_done_all_that_stands_behind_its_window(
    tmp_path: Path, calm: Calm
) -> None:
    """
    When a rank dies in phase `tail`, then its window has closed, it has done what stands behind that, and has not
    begun the next step; the others go on from what they have done there, too.
    """
    spec = "kill:rank=1,step=6,phase=tail"
    outcome = disturbed(tmp_path / "run", "schedules", chaos=(spec,))
    assert trail(outcome, 1)[-3:] == ["head 6", "window 6", "tail 6"]
    assert gone(outcome) == [(1, {"step": 6, "window": False, "tail": True, "after": False})]
    assert [(c["phase"], c["step"], c["evidence"]) for c in outcome.chaos()] == [
        ("tail", 6, {"window_closed": 6})
    ]
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["step"], incident["steps_lost"]) == ("recover", 7, 0)
    assert incident["inexact"] == []
    identical(outcome, calm("schedules"))


# ---------------------------------------------------------------- the table

HABITS = ("schedules", "averages", "plateaus", "scales")
COVERING = [
    ("averages", "before"),
    pytest.param("plateaus", "before", marks=pytest.mark.soak),
    pytest.param("schedules", "before", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("slow", ["before", "after"])
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.soak
def test_what_stands_behind_the_window_is_done_once_by_everyone(
    tmp_path: Path, calm: Calm, habit: str, slow: str
) -> None:
    """
    When each rank is killed in its update, in its tail and in an evaluation after it, in steps in which the ranks are
    apart, then what the loop does behind its window has been done once for each step, on every rank; or the report
    names the line.
    """
    kills = [(rank, phase) for phase in ("update", "tail", "evaluation") for rank in range(3)]
    table(tmp_path, calm, habit, slow, kills)


@pytest.mark.parametrize(("habit", "slow"), COVERING)
def test_a_tail_is_done_once_by_everyone(tmp_path: Path, calm: Calm, habit: str, slow: str) -> None:
    """
    When ranks are killed in their update, tail and evaluation, in steps in which the ranks are apart, then what the
    loop does behind its window has been done once for each step, on every rank; or the report names the line.
    """
    table(tmp_path, calm, habit, slow, [(0, "update"), (2, "tail"), (1, "evaluation")])


def table(tmp_path: Path, calm: Calm, habit: str, slow: str, kills: list[tuple[int, str]]) -> None:
    """
    A job with these kills, one in every third step.
    """
    steps = [3 * turn + 4 for turn in range(len(kills))]
    last = ("--evaluates", "--steps", str(steps[-1] + 3))
    chaos = [f"kill:rank={r},step={s},phase={p}" for s, (r, p) in zip(steps, kills, strict=True)]
    outcome = disturbed(
        tmp_path / "run", habit, *last, "--slow", slow, "--slowly", ",".join(map(str, steps)),
        chaos=tuple(chaos),
    )  # fmt: skip
    assert [(c["rank"], c["phase"]) for c in outcome.chaos()] == kills
    assert [(where["tail"], where["after"]) for _, where in gone(outcome)] == [
        (phase == "tail", phase == "evaluation") for _, phase in kills
    ]
    assert len(outcome.incidents) == len(kills), outcome.incidents
    never_silent(outcome, calm(habit, *last))
    if habit != "plateaus":  # nobody waits for another there: everyone can come to its end
        assert [incident["inexact"] for incident in outcome.incidents] == [[]] * len(kills)


@pytest.mark.parametrize(
    ("rank", "phase"),
    [
        pytest.param(1, "update", marks=pytest.mark.soak),
        (1, "forward"),
        pytest.param(0, "update", marks=pytest.mark.soak),
        pytest.param(2, "update", marks=pytest.mark.soak),
    ],
)
def test_rows_of_a_step_in_which_a_rank_dies_are_there_once(
    tmp_path: Path, calm: Calm, rank: int, phase: str
) -> None:
    """
    When each rank records a row of each step and evaluates after it, the ranks come to their windows one after the
    other, and one is killed in its update, which the others complete, or in its forward pass, which all repeat, then
    each rank has each row of the undisturbed job once, in its order.
    """
    arguments = ("schedules", "--rows", "--evaluates")
    outcome = disturbed(
        tmp_path / "run", *arguments, "--slow", "before", "--slowly", "6",
        chaos=(f"kill:rank={rank},step=6,phase={phase}",),
    )  # fmt: skip
    assert [(c["rank"], c["phase"], c["step"]) for c in outcome.chaos()] == [(rank, phase, 6)]
    assert [each for each, _ in gone(outcome)] == [rank]
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    assert (incident["step"], incident["inexact"]) == (7 if phase == "update" else 6, [])
    found = evaluations(outcome)
    assert len(found) == 3
    for name, lines in found.items():
        written = [json.loads(line) for line in lines]
        assert [(row["step"], "after" in row) for row in written] == [
            (step, after) for step in range(1, 13) for after in (False, True)
        ], name
    assert found == evaluations(calm(*arguments))
    identical(outcome, calm(*arguments))


# ---------------------------------------------------------------- other loops


@pytest.mark.soak
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_rates_that_are_set_by_hand_are_those_of_their_steps(
    tmp_path: Path, calm: Calm, phase: str
) -> None:
    """
    When a loop sets the learning rate at the head of its iteration, and a rank dies while some have set that of the next
    step and others have not, then each step is trained with its own.
    """
    outcome = disturbed(
        tmp_path / "run", "by-hand", "--slow", "head", "--slowly", "5,8",
        chaos=(f"kill:rank=1,step=5,phase={phase}", "kill:rank=0,step=7,phase=tail"),
    )  # fmt: skip
    assert [incident["inexact"] for incident in outcome.incidents] == [[], []]
    identical(outcome, calm("by-hand"))


@pytest.mark.soak
def test_a_rank_that_dies_in_an_evaluation_leaves_nobody_in_its_mode(
    tmp_path: Path, calm: Calm
) -> None:
    """
    When a rank dies in an evaluation behind the window, before what all do together there, then all train on in the mode
    of training; the report may name the line.
    """
    outcome = disturbed(tmp_path / "run", "evaluates", "--die", "1,6")
    assert trail(outcome, 1)[-1] == "dies 6"
    assert [incident["steps_lost"] for incident in outcome.incidents] == [0]
    never_silent(outcome, calm("evaluates"))


@pytest.mark.soak
@pytest.mark.parametrize("slow", ["before", "after"])
def test_a_replacement_knows_from_its_first_step_where_steps_end(
    tmp_path: Path, calm: Calm, slow: str
) -> None:
    """
    When a loop of its own says where its steps end, and the process that replaces a rank is killed in its own first
    tail, then nothing is done twice, or not at all.
    """
    chaos = ("kill:rank=1,step=4,phase=update", "kill:rank=1,step=5,phase=tail")
    outcome = disturbed(
        tmp_path / "run", "schedules", "--own", "--slow", slow, "--slowly", "4,5", chaos=chaos
    )
    assert [c["incarnation"] for c in outcome.chaos()] == [0, 1]
    assert trail(outcome, 1, 1) == ["head 5", "window 5", "tail 5"]
    assert [where["tail"] for _, where in gone(outcome)] == [False, True]
    never_silent(outcome, calm("schedules"))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_modes_that_ranks_leave_differently_are_no_corruption(
    tmp_path: Path, calm: Calm, rank: int
) -> None:
    """
    When rank 0 evaluates alone, and leaves the model in that mode until the next iteration begins, and another
    rank dies, then nobody is at fault for that, and nothing is lost.
    """
    chaos = (f"kill:rank={rank},step=6,phase=forward",)
    outcome = disturbed(tmp_path / "run", "leaves-modes", chaos=chaos)
    (incident,) = outcome.incidents
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    identical(outcome, calm("leaves-modes"))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 2])
def test_a_mode_that_changes_for_good_in_a_tail_changes_on_all_ranks(
    tmp_path: Path, calm: Calm, rank: int
) -> None:
    """
    When a part of the model is put into another mode behind a window, for good, and a rank dies before it has ended
    that step, then its replacement goes on in the new mode.
    """
    outcome = disturbed(
        tmp_path / "run",
        "switches",
        "--slowly",
        "6",
        chaos=(f"kill:rank={rank},step=6,phase=tail",),
    )
    never_silent(outcome, calm("switches"))


# ---------------------------------------------------------------- copies that differ


FLIP = "bitflip:rank=1,step=5,target=param"


@pytest.mark.soak
def test_a_flipped_bit_is_found_when_another_rank_is_lost(tmp_path: Path, calm: Calm) -> None:
    """
    When a bit of a parameter of one rank has flipped, and another is lost before that has come into any sum, then the
    rank has a fault of kind `corruption`, and all go on as if neither had happened. When it has happened is not
    known, and so the report says that it may have come into all-reduces.
    """
    chaos = (FLIP, "kill:rank=3,step=6,phase=forward")
    outcome = disturbed(tmp_path / "run", "schedules", nproc=4, chaos=chaos)
    (incident,) = outcome.incidents
    assert [(fault["kind"], fault["rank"]) for fault in incident["faults"]] == [
        ("process", 3),
        ("corruption", 1),
    ]
    assert (
        "ranks [1] hold another copy of model of shard 'dense'" in incident["faults"][1]["evidence"]
    )
    (sentence,) = incident["inexact"]
    assert (
        "what ranks [1] have given to all-reduces in steps 1 to 5 may be in the state of all"
        in sentence
    )
    identical(outcome, calm("schedules", nproc=4))


@pytest.mark.soak
def test_a_flipped_bit_that_has_come_into_all_reduces_is_told(tmp_path: Path, calm: Calm) -> None:
    """
    When a bit of a parameter of one rank has flipped, and another is lost some steps later, then all go on with the same
    state, which is not that of the undisturbed job, and the report says so.
    """
    chaos = (FLIP, "kill:rank=3,step=8,phase=forward")
    outcome = disturbed(tmp_path / "run", "schedules", nproc=4, chaos=chaos)
    (incident,) = outcome.incidents
    assert ("corruption", 1) in [(fault["kind"], fault["rank"]) for fault in incident["faults"]]
    assert "in steps 1 to 7 may be in the state of all" in incident["inexact"][0]
    finals = outcome.finals()
    for name in REPLICATED:
        assert len({final[name] for final in finals.values()}) == 1, name
    assert finals[0]["weights"] != calm("schedules", nproc=4).finals()[0]["weights"]


TWO = (FLIP, "raise:rank=0,step=6,phase=forward,kind=network")


def test_two_copies_that_differ_end_a_job_that_has_nothing_else(tmp_path: Path) -> None:
    """
    When the copies of two ranks differ, and there is nothing that is not later than their last comparison, then
    the job ends with exit code 4, says why, and writes nothing that may be wrong.
    """
    options = [word for spec in TWO for word in ("--chaos", spec)]
    outcome = run(tmp_path / "run", *options, script=SCRIPT, arguments=("schedules",), nproc=2)
    assert outcome.code == 4, outcome.output
    assert (
        "no sound copy of shard 'dense', of step 0 or earlier, is left on ranks [0, 1]"
        in outcome.output
    )
    faults = outcome.incidents[0]["faults"]
    assert ("corruption", None) in [(fault["kind"], fault["rank"]) for fault in faults]
    assert not list((outcome.run_dir / "checkpoints").glob("step-*"))


@pytest.mark.soak
def test_two_copies_that_differ_go_back_to_a_checkpoint_that_cannot_be_wrong(
    tmp_path: Path, calm: Calm
) -> None:
    """
    When the copies of two ranks differ, and there are checkpoints of before and after their last comparison, then both
    go back to the newest that is not later than that, and end as if nothing had happened.
    """
    options = [
        word
        for spec in ("raise:rank=1,step=4,phase=forward,kind=network", *TWO)
        for word in ("--chaos", spec)
    ]
    outcome = run(
        tmp_path / "run", "--checkpoint-every", "1", *options,
        script=SCRIPT, arguments=("schedules",), nproc=2,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    last = outcome.incidents[-1]
    assert ("corruption", None) in [(fault["kind"], fault["rank"]) for fault in last["faults"]]
    assert last["step"] <= 5  # the bit is flipped at the end of that step
    identical(outcome, calm("schedules", nproc=2))
