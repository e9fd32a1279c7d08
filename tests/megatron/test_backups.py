"""
Jobs on megatron-core that go back to the copies that their ranks keep in host memory.
"""

from pathlib import Path

import pytest

from tests.e2e.doubts import doubts
from tests.e2e.jobs import identical
from tests.megatron.jobs import SHAPES, Undisturbed, train

JOBS = [
    *((name,) for name, (ranks, _) in SHAPES.items() if ranks == 4),
    *(("TP1DP4", *more) for more in (("--fp32",), ("--fp32", "--overlap"), ("--overlap",))),
]


@pytest.mark.soak
@pytest.mark.parametrize("shape", JOBS, ids="-".join)
def test_all_ranks_go_back_to_their_copies_in_host_memory(
    shape: tuple[str, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    """When no copy after a step is sound, then all ranks take back the copy of an earlier step. A
    rank that was killed in its update fetches the copy of another rank, if another rank holds all
    of its shards. Losses and final state are those of the undisturbed run."""
    name, *more = shape
    alone = name.endswith("-one")  # no rank can fetch its shard from another one
    kill = () if alone else ("kill:rank=2,step=7,phase=update",)
    kind = "network" if alone else "memory"
    outcome = train(
        tmp_path / "run", name, f"raise:rank=1,step=6,phase=backward,kind={kind}", *kill,
        options=("--backup-every", "2"), more=tuple(more),
        environment=doubts(tmp_path, {1: ("retry", 3), 2: ("recover", 5)}),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, undisturbed(name, *more))
    expected = [("go back", 2, 3), ("go back", 4, 3)]
    assert [
        (each["strategy"], each["step"] - 1, each["steps_lost"]) for each in outcome.incidents
    ] == expected[: 1 + len(kill)]
