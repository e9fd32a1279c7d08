"""
The tails of loops, and ranks that die in a tail or elsewhere.

The tail is the code between the update and the next step. The final state of every rank must equal
that of the undisturbed job, or the report must name the difference.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "e2e" / "tails_job.py"
REPLICATED = (
    "weights", "optimizer", "moments", "groups", "scheduler", "schedule", "averaged", "scale",
    "modes", "trained",
)  # fmt: skip
"""The digests that must be the same on all ranks. `scaler` is among them if the job has a
scaler."""

Calm = Callable[..., Outcome]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """
    Return a function that gives the undisturbed job of a habit. Each job runs once.
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
    Run the job with these faults, check that its exit code is 0, and return its outcome.
    """
    options = [word for spec in chaos for word in ("--chaos", spec)]
    outcome = run(where, *options, script=SCRIPT, arguments=arguments, nproc=nproc)
    assert outcome.code == 0, outcome.output
    return outcome


def never_silent(outcome: Outcome, calm: Outcome) -> None:
    """
    Check that the job has the results of the undisturbed job, or reports the difference.

    A report must name a line of the script's tail. In both cases, all ranks must have the same
    replica state.
    """
    inexact = [sentence for incident in outcome.incidents for sentence in incident["inexact"]]
    finals = outcome.finals()
    for name in (*REPLICATED, "scaler"):
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
    """Return the evaluations that each rank has written."""
    found = outcome.run_dir.glob("records-rank*.jsonl")
    return {path.name: path.read_text().splitlines() for path in found}


def lines_of_tails() -> set[int]:
    """
    Return the line numbers of the script's loop after its update window.
    """
    text = SCRIPT.read_text().splitlines()
    first = text.index('        come("window", step)') + 1
    return set(range(first, text.index('        come("tail", step)') + 2))


def gone(outcome: Outcome) -> list[tuple[int, Mapping[str, Any]]]:  # Any: JSON
    """
    Return the ranks whose processes were killed, with their last positions.
    """
    story = [
        json.loads(line) for line in (outcome.run_dir / "story.jsonl").read_text().splitlines()
    ]
    exits = [event["body"] for event in story if event["kind"] == "Exited"]
    return [(each["rank"], each["position"]) for each in exits if each["code"] == -9]


def trail(outcome: Outcome, rank: int, incarnation: int = 0) -> list[str]:
    """
    Return the positions that the process of a rank and incarnation has written.
    """
    return (outcome.run_dir / f"trail-rank{rank}.{incarnation}").read_text().splitlines()


# --------------------------------------------------------------- kills in the phase `tail` of chaos


@pytest.mark.soak
def test_a_rank_killed_in_phase_tail_has_completed_its_tail(tmp_path: Path, calm: Calm) -> None:
    """When a rank dies in phase `tail`, then its window has closed, its tail is complete, and the
    next step has not begun. The others continue from their own tails."""
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


# ---------------------------------------------------------- kills in updates, tails and evaluations

HABITS = ("schedules", "averages", "plateaus", "scales")
COVERING = [
    pytest.param("averages", "before", marks=pytest.mark.soak),
    pytest.param("plateaus", "before", marks=pytest.mark.soak),
    pytest.param("schedules", "before", marks=pytest.mark.soak),
]


@pytest.mark.parametrize("slow", ["before", "after"])
@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.soak
def test_the_tail_is_executed_once_or_the_report_names_its_line(
    tmp_path: Path, calm: Calm, habit: str, slow: str
) -> None:
    """When each rank is killed in its update, in its tail and in an evaluation after it, in steps
    in which the ranks are apart, then every rank has executed the tail once for each step, or the
    report names the line."""
    kills = [(rank, phase) for phase in ("update", "tail", "evaluation") for rank in range(3)]
    table(tmp_path, calm, habit, slow, kills)


@pytest.mark.parametrize(("habit", "slow"), COVERING)
def test_the_tail_is_executed_once_on_every_rank_or_reported(
    tmp_path: Path, calm: Calm, habit: str, slow: str
) -> None:
    """When ranks are killed in their update, tail and evaluation, in steps in which the ranks
    are apart, then every rank has executed the tail once for each step, or the report names the
    line."""
    table(tmp_path, calm, habit, slow, [(0, "update"), (2, "tail"), (1, "evaluation")])


def table(tmp_path: Path, calm: Calm, habit: str, slow: str, kills: list[tuple[int, str]]) -> None:
    """
    Run a job with these kills, one in every third step, and check its results against the
    undisturbed job.
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
    # in the tails of the other habits no rank waits for another, so each rank completes its tail
    if habit != "plateaus":
        assert [incident["inexact"] for incident in outcome.incidents] == [[]] * len(kills)


@pytest.mark.soak
@pytest.mark.parametrize("habit", ["schedules", "averages", "scales"])
def test_the_tail_of_a_step_with_a_killed_rank_is_executed_once_on_every_rank(
    tmp_path: Path, calm: Calm, habit: str
) -> None:
    """When a rank is killed in its update, one rank has updated before it and another one updates
    after it, then all three have executed the tail of that step once at the end."""
    outcome = disturbed(
        tmp_path / "run", habit, "--slow", "before", "--slowly", "6",
        chaos=("kill:rank=1,step=6,phase=update",),
    )  # fmt: skip
    identical(outcome, calm(habit))
    assert len(outcome.finals()) == 3
    assert [(i["steps_lost"], i["inexact"]) for i in outcome.incidents] == [(0, [])]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("rank", "phase"),
    [(1, "update"), (1, "forward"), (0, "update"), (2, "update")],
)
def test_each_rank_records_each_row_once_when_a_rank_dies(
    tmp_path: Path, calm: Calm, rank: int, phase: str
) -> None:
    """When each rank records a row of each step, and a rank is killed in its update, which the
    others complete, or in its forward pass, which all repeat, then each rank has each row of the
    undisturbed job once, in order. The ranks evaluate after each step, and come to their windows
    one after the other."""
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


# ---------------------------------------------------------------- loops of other forms


@pytest.mark.soak
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_each_step_uses_its_own_learning_rate_set_by_hand(
    tmp_path: Path, calm: Calm, phase: str
) -> None:
    """When a loop sets the learning rate at the head of each step, and a rank dies while only some
    ranks have set that of the next step, then each step is trained with its own rate."""
    outcome = disturbed(
        tmp_path / "run", "by-hand", "--slow", "head", "--slowly", "5,8",
        chaos=(f"kill:rank=1,step=5,phase={phase}", "kill:rank=0,step=7,phase=tail"),
    )  # fmt: skip
    assert [incident["inexact"] for incident in outcome.incidents] == [[], []]
    identical(outcome, calm("by-hand"))


@pytest.mark.soak
def test_survivors_leave_evaluation_mode_when_a_rank_dies_in_an_evaluation(
    tmp_path: Path, calm: Calm
) -> None:
    """When a rank dies in an evaluation after the window, before the collective there, then all
    ranks train on in training mode; the report may name the line."""
    outcome = disturbed(tmp_path / "run", "evaluates", "--die", "1,6")
    assert trail(outcome, 1)[-1] == "dies 6"
    assert [incident["steps_lost"] for incident in outcome.incidents] == [0]
    never_silent(outcome, calm("evaluates"))


@pytest.mark.soak
@pytest.mark.parametrize("slow", ["before", "after"])
def test_a_replacement_killed_in_its_first_tail_repeats_no_step_work(
    tmp_path: Path, calm: Calm, slow: str
) -> None:
    """When a loop itself says where its steps end, and the process that replaces a rank is killed
    in its own first tail, then no work is done twice or left out."""
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
def test_different_module_modes_of_ranks_are_no_corruption(
    tmp_path: Path, calm: Calm, rank: int
) -> None:
    """When rank 0 evaluates alone and leaves the model in evaluation mode until the next iteration,
    and another rank dies, then no rank has a corruption fault, and no step is lost."""
    chaos = (f"kill:rank={rank},step=6,phase=forward",)
    outcome = disturbed(tmp_path / "run", "leaves-modes", chaos=chaos)
    (incident,) = outcome.incidents
    assert [fault["kind"] for fault in incident["faults"]] == ["process"]
    identical(outcome, calm("leaves-modes"))


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 2])
def test_a_permanent_mode_change_in_a_tail_reaches_the_replacement(
    tmp_path: Path, calm: Calm, rank: int
) -> None:
    """When a part of the model is put into another mode for good in a tail, and a rank dies before
    it has ended that step, then its replacement trains on in the new mode."""
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
    """When a bit of a parameter of one rank has flipped, and another rank is lost before the next
    all-reduce, then the first rank has a fault of kind `corruption`, and losses and final state are
    those of the undisturbed run. The time of the flip is unknown, so the report says that wrong
    values may have entered all-reduces."""
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
        "the contributions of ranks [1] to all-reduces in steps 1 to 5 may be in the state of all "
        "ranks" in sentence
    )
    identical(outcome, calm("schedules", nproc=4))


@pytest.mark.soak
def test_a_flipped_bit_that_reached_all_reduces_is_reported(tmp_path: Path, calm: Calm) -> None:
    """When a bit of a parameter of one rank has flipped, and another rank is lost some steps later,
    then all ranks train on with the same state, which differs from the undisturbed job, and the
    report says so."""
    chaos = (FLIP, "kill:rank=3,step=8,phase=forward")
    outcome = disturbed(tmp_path / "run", "schedules", nproc=4, chaos=chaos)
    (incident,) = outcome.incidents
    assert ("corruption", 1) in [(fault["kind"], fault["rank"]) for fault in incident["faults"]]
    assert "in steps 1 to 7 may be in the state of all ranks" in incident["inexact"][0]
    finals = outcome.finals()
    for name in REPLICATED:
        assert len({final[name] for final in finals.values()}) == 1, name
    assert finals[0]["weights"] != calm("schedules", nproc=4).finals()[0]["weights"]


TWO = (FLIP, "raise:rank=0,step=6,phase=forward,kind=network")


@pytest.mark.soak
def test_two_different_copies_without_an_earlier_checkpoint_end_the_job(tmp_path: Path) -> None:
    """When the copies of two ranks differ, and there is no checkpoint from before their last
    comparison, then the job ends with exit code 4 and the reason, and writes no checkpoint that may
    be wrong."""
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
def test_two_different_copies_return_to_a_checkpoint_that_is_sound(
    tmp_path: Path, calm: Calm
) -> None:
    """When the copies of two ranks differ, and there are checkpoints from before and after their
    last comparison, then both ranks return to the newest one that is not later than the comparison,
    and end as the undisturbed run."""
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
    assert last["step"] <= 5  # the bit is flipped at the end of step 5
    identical(outcome, calm("schedules", nproc=2))
