"""Real megatron-core under `tft run --adaptor megatron`, with ranks killed and broken: each run is
compared bit for bit with the undisturbed one of the same shape."""

from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome, identical
from tests.megatron.jobs import SHAPES, STEPS, Undisturbed, train

PHASES = ("forward", "backward", "update", "between")
SOAK = pytest.mark.soak
FOUR = [shape for shape, (ranks, _) in SHAPES.items() if ranks == 4 and shape != "TP1DP4-one"]


def struck(outcome: Outcome) -> set[tuple[str, int]]:
    """
    Return the kind and rank of each fault, after a check that no step was lost.

    Two faults in a row may belong to one incident.
    """
    assert [i["steps_lost"] for i in outcome.incidents] == [0] * len(outcome.incidents)
    return {(f["kind"], f["rank"]) for i in outcome.incidents for f in i["faults"]}


@pytest.mark.parametrize(
    "shape", ["TP1DP4", *(pytest.param(s, marks=SOAK) for s in FOUR if s != "TP1DP4")]
)
def test_kills_in_each_phase_and_memory_faults_leave_the_losses_unchanged(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When each rank in turn is killed, each in another phase of a step, and two report a memory
    fault, one in the backward pass with half of the gradients accumulated and one in the
    optimizer's update, then their state comes from replicas, no step is lost, and losses and final
    state are those of the undisturbed run."""
    specs = [f"kill:rank={rank},step={rank + 2},phase={phase}" for rank, phase in enumerate(PHASES)]
    specs += [
        # Step 7 follows a step that all ranks have repeated. An earlier fault might interrupt
        # rank 3 before it is killed.
        "raise:rank=0,step=7,phase=backward,kind=memory",
        "raise:rank=1,step=8,phase=update,kind=memory",
    ]
    outcome = train(tmp_path / "run", shape, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    killed = {("process", rank) for rank in range(len(PHASES))}
    assert struck(outcome) == killed | {("memory", 1), ("memory", 0)}


@SOAK
@pytest.mark.parametrize("shape", FOUR)
def test_a_killed_rank_leaves_the_losses_unchanged(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When the last rank is killed in the middle of the optimizer's update, then losses and final
    state are those of the undisturbed run."""
    outcome = train(tmp_path / "run", shape, "kill:rank=3,step=4,phase=update")
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    assert struck(outcome) == {("process", 3)}


@SOAK
@pytest.mark.parametrize("shape", FOUR)
def test_a_memory_fault_in_each_rank_leaves_the_losses_unchanged(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When each rank in turn loses its memory in the middle of the update, then it gets its state
    back from a replica, and losses and final state are those of the undisturbed run."""
    specs = [f"raise:rank={rank},step={rank + 2},phase=update,kind=memory" for rank in range(4)]
    outcome = train(tmp_path / "run", shape, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    assert struck(outcome) == {("memory", rank) for rank in range(4)}


@SOAK
@pytest.mark.parametrize("shape", FOUR)
def test_two_faults_at_once_leave_the_losses_unchanged(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When two ranks with different shards are lost at once, one in its forward pass and one in its
    update, and later one is killed while another one is replaced, then losses and final state are
    those of the undisturbed run."""
    first, second = (0, 1) if shape.startswith(("TP1", "TP2", "EP2")) else (0, 3)
    specs = (
        f"kill:rank={first},step=3,phase=forward",
        f"raise:rank={second},step=3,phase=backward,kind=memory",
        f"kill:rank={first},step=6,phase=backward",
        f"kill:rank={second},step=6,phase=repair",
    )
    outcome = train(tmp_path / "run", shape, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    assert struck(outcome) >= {("process", first), ("memory", second)}


@SOAK
@pytest.mark.timeout(700)
@pytest.mark.parametrize("shape", ["TP2DP4", "PP2DP4"])
def test_eight_ranks_survive_a_kill_and_two_at_once(
    shape: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When one of eight ranks is killed, and then two of different shards at once, then losses and
    final state are those of the undisturbed run."""
    specs = (
        "kill:rank=5,step=3,phase=forward",
        "kill:rank=0,step=6,phase=backward",
        "kill:rank=7,step=6,phase=backward",
    )
    outcome = train(tmp_path / "run", shape, *specs)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape))
    assert struck(outcome) == {("process", rank) for rank in (0, 5, 7)}


@SOAK
@pytest.mark.parametrize(
    ("shape", "more"),
    [
        ("TP1DP4", ("--overlap",)),
        ("TP1DP4-plain", ("--overlap",)),
        ("PP2DP2", ("--overlap",)),
        ("TP1DP4", ("--fp32",)),
        ("TP1DP4-plain", ("--fp32",)),
        ("TP1DP4", ("--fp16",)),
        ("PP2DP2", ("--tied",)),
    ],
)
def test_jobs_with_other_megatron_settings_survive_killed_ranks(
    shape: str, more: tuple[str, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When all-reduces overlap with computation, when all state is in 32 bits, when steps are
    skipped for the loss scale, or when the last stage has a copy of the embeddings, then a rank
    killed before the first step and another one later leave losses and final state as in the
    undisturbed run."""
    specs = ("kill:rank=3,step=1,phase=forward", f"kill:rank=0,step={STEPS - 2},phase=backward")
    outcome = train(tmp_path / "run", shape, *specs, more=more)
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape, *more))
    assert struck(outcome) == {("process", 0), ("process", 3)}


@SOAK
def test_a_replacement_has_the_loss_scale_of_the_survivors(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When a rank dies between Megatron's change of the loss scale and the update, and the others
    have completed both, then the replacement has their loss scale, and losses and final state are
    those of the undisturbed run."""
    outcome = train(tmp_path / "run", "TP1DP4-plain", more=("--fp16", "--dies", "5:scaled"))
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed("TP1DP4-plain", "--fp16"))
    assert struck(outcome) == {("process", 1)}


@SOAK
@pytest.mark.parametrize(
    ("shape", "more", "dies"),
    [
        pytest.param("EP2DP4", (), "4:micro", id="in the middle of a pass"),
        pytest.param(
            "TP1DP4-plain", ("--experts",), "5:scaled", id="when the others go on without"
        ),
    ],
)
def test_router_counts_of_a_forward_pass_are_counted_once(
    shape: str, more: tuple[str, ...], dies: str, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When the router counts in buffers which experts its tokens went to, and a rank dies in the
    middle of a step, or between its all-reduces and its update, then no rank keeps the counts of
    the interrupted step, and losses and final state are those of the undisturbed run."""
    counts = ("--balancing", "global_aux_loss", *more)
    outcome = train(tmp_path / "run", shape, more=(*counts, "--dies", dies))
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(shape, *counts))
    assert struck(outcome) == {("process", 1)}
