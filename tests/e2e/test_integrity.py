"""
Copies that are compared while the job trains: flipped bits are found, the right rank is named, and
training continues as if nothing had happened.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import ROOT, TRAIN, Outcome, identical, run, run_once

STEPS = 60
EVERY = 10
"""Every byte is compared once in this many steps, and a copy is kept as often."""
FLIPPED = 25
"""The step after which bits flip."""
REPLICAS = ROOT / "examples" / "gpt" / "replicas.py"
SHARDED = ROOT / "examples" / "gpt" / "sharded.py"
COMPARED = ("--integrity", str(EVERY))
BACKED_UP = (*COMPARED, "--backup-every", str(EVERY))


def train(run_dir: Path, ranks: int, *options: str, **how: Any) -> Outcome:  # Any: as `run` takes
    """
    Run the example with this number of ranks.
    """
    how = {"script": TRAIN, "arguments": ("--steps", str(STEPS)), **how}
    return run(run_dir, *options, nproc=ranks, **how)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:  # Any: a function
    """
    Return a function that gives the outcome of the undisturbed job with this number of ranks.
    """
    return lambda ranks: run_once(
        tmp_path_factory, f"integrity-{ranks}", lambda where: train(where, ranks)
    )


def flip(rank: int, keys: str = "target=param") -> tuple[str, str]:
    return ("--chaos", f"bitflip:rank={rank},step={FLIPPED},{keys}")


def found(outcome: Outcome, rank: int | None) -> dict[str, Any]:  # Any: JSON
    """
    Check that the flip led to one incident, in time, with a fault of this rank. Return the incident.
    """
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    named = {(fault["kind"], fault["rank"]) for fault in incident["faults"]}
    assert named == {("corruption", rank)}, incident["faults"]
    steps = [fault["step"] for fault in incident["faults"]]
    assert FLIPPED < min(steps) <= FLIPPED + EVERY + 1, incident
    return incident


def undone(outcome: Outcome, undisturbed: Outcome, rank: int | None) -> None:
    """
    Check that all ranks went back to a copy from before the flip, and that the job ended as the
    undisturbed one.
    """
    incident = found(outcome, rank)
    assert incident["inexact"] == []
    assert incident["step"] <= FLIPPED
    assert 0 < incident["steps_lost"] <= 2 * EVERY
    identical(outcome, undisturbed)


@pytest.mark.soak
def test_flip_on_one_of_three_ranks_is_undone(tmp_path: Path, calm: Any) -> None:
    """When bits of one of three copies flip, then the rank is named within the steps of a cycle, all
    ranks return to a copy from before, and the job ends as if nothing had happened."""
    undone(train(tmp_path / "run", 3, *BACKED_UP, *flip(1)), calm(3), 1)


@pytest.mark.soak
def test_flip_on_one_of_two_ranks_is_undone_and_traced(tmp_path: Path, calm: Any) -> None:
    """When bits of one of two copies flip, then all ranks return to a copy from before. When the
    steps are computed again, the rank with the wrong copy is named."""
    undone(train(tmp_path / "run", 2, *BACKED_UP, *flip(1)), calm(2), 1)


@pytest.mark.soak
def test_flip_in_the_last_step_is_undone(tmp_path: Path, calm: Any) -> None:
    """When bits of one of three copies flip after the last step, then no slice of them is compared
    any more. The comparison at the end of the job finds them: all ranks return to a copy from
    before, and the job ends as if nothing had happened."""
    flip = ("--chaos", f"bitflip:rank=1,step={STEPS},target=param")
    outcome = train(tmp_path / "run", 3, *BACKED_UP, *flip)
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [
        ("corruption", 1, STEPS + 1)
    ]
    assert incident["inexact"] == []
    assert 0 < incident["steps_lost"] <= 2 * EVERY
    identical(outcome, calm(3))


def test_two_copies_that_differ_end_the_job_without_an_earlier_one(tmp_path: Path) -> None:
    """When bits of one of two copies flip and no copy is kept, then the job ends with a sentence that
    names both ranks and the last sound step."""
    outcome = train(tmp_path / "run", 2, *COMPARED, *flip(0))
    assert outcome.code == 4, outcome.output
    (incident,) = outcome.incidents
    assert "ranks [0, 1]" in incident["faults"][0]["evidence"]
    assert "or earlier, is left on ranks [0, 1]" in outcome.report["why"]


@pytest.mark.soak
def test_two_copies_that_differ_are_made_equal_if_the_job_is_to_continue(tmp_path: Path) -> None:
    """When bits of one of two copies flip, no copy is kept, and the job is to continue, then both
    ranks go on from one copy. The report names the first step that may be wrong."""
    outcome = train(tmp_path / "run", 2, *COMPARED, "--on-corruption", "continue", *flip(0))
    incident = found(outcome, None)
    assert any("may be wrong since step" in sentence for sentence in incident["inexact"])
    finals = outcome.finals()
    for name in ("parameters", "optimizer", "scheduler"):
        assert finals[0][name] == finals[1][name]


@pytest.mark.soak
def test_copy_of_the_majority_counts_without_an_earlier_one(tmp_path: Path) -> None:
    """When bits of one of three copies flip and no copy is kept, then the rank takes the state of the
    majority, and the report names the first step that may be wrong."""
    outcome = train(tmp_path / "run", 3, *COMPARED, *flip(2))
    incident = found(outcome, 2)
    assert incident["steps_lost"] == 0
    assert any("may be wrong since step" in sentence for sentence in incident["inexact"])


PATTERNS = {
    "one": "",
    "three": ",bits=3",
    "periodic": ",period=32,bits=2",
}
KINDS = ("param", "exp_avg", "exp_avg_sq")


@pytest.mark.soak
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (3, 0), (3, 2), (4, 1), (4, 3)])
def test_flip_of_any_kind_is_undone(
    tmp_path: Path, calm: Any, kind: str, pattern: str, ranks: int, rank: int
) -> None:
    """When one bit, several bits or a periodic pattern flips in a parameter or a moment, on any rank,
    then it is found in time, and the job ends as if nothing had happened."""
    spec = f"target={kind},tensor=3{PATTERNS[pattern]}"
    outcome = train(tmp_path / "run", ranks, *BACKED_UP, *flip(rank, spec))
    undone(outcome, calm(ranks), rank)


MASTERS = ("--steps", str(STEPS), "--dtype", "bfloat16", "--copies", "2")


@pytest.mark.soak
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_flip_of_a_master_is_undone(tmp_path: Path, rank: int, pattern: str) -> None:
    """When bits of a 32-bit master flip on one of the two ranks that hold it, then the job ends as if
    nothing had happened."""
    how: dict[str, Any] = {"script": REPLICAS, "arguments": MASTERS}
    undisturbed = train(tmp_path / "calm", 4, **how)
    tensor = (0, 2)[rank % 2]  # each rank has the masters of half of the tensors
    spec = f"target=master,tensor={tensor}{PATTERNS[pattern]}"
    outcome = train(tmp_path / "run", 4, *BACKED_UP, *flip(rank, spec), **how)
    undone(outcome, undisturbed, rank)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [0, 3])
def test_flip_of_a_sharded_state_is_undone(tmp_path: Path, rank: int, kind: str) -> None:
    """When bits flip in a shard of FSDP on one of the two ranks that hold it, then the job ends as if
    nothing had happened."""
    how: dict[str, Any] = {"script": SHARDED}
    undisturbed = train(tmp_path / "calm", 4, **how)
    outcome = train(tmp_path / "run", 4, *BACKED_UP, *flip(rank, f"target={kind}"), **how)
    undone(outcome, undisturbed, rank)


@pytest.mark.soak
def test_flip_and_a_killed_rank_are_undone_in_one_job(tmp_path: Path, calm: Any) -> None:
    """When bits flip on one rank and another rank is killed in the next step, then the job ends as if
    nothing had happened."""
    kill = ("--chaos", f"kill:rank=0,step={FLIPPED + 1},phase=backward")
    outcome = train(tmp_path / "run", 3, *BACKED_UP, *flip(1), *kill)
    assert outcome.code == 0, outcome.output
    assert [incident["inexact"] for incident in outcome.incidents] == [[]]
    identical(outcome, calm(3))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_no_alarm_in_ten_thousand_steps(tmp_path: Path) -> None:
    """When nothing flips in 10,000 steps, then there is no incident."""
    how = {"arguments": ("--steps", "10000"), "limit": 1700}
    outcome = train(tmp_path / "run", 3, *COMPARED, **how)
    assert (outcome.code, outcome.incidents) == (0, []), outcome.output


@pytest.mark.soak
def test_adaptor_that_cannot_list_its_memory_is_refused(tmp_path: Path) -> None:
    """When copies are to be compared and the adaptor cannot list the memory of its shards, then no
    step is trained, and the message names the option."""
    script = ROOT / "tests" / "e2e" / "fake_job.py"
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", *COMPARED, script=script, arguments=("5",), nproc=2
    )
    assert outcome.code not in (0, 3), outcome.output
    assert "would be compared while the job trains: run without --integrity" in outcome.output
    assert outcome.rows() == {}
