"""
Tests of a script whose ranks hold different parts of the state, each part on several ranks.

A lost rank's state comes from another rank with the same part. tft invents no state for a part that
no rank holds any more.
"""

from pathlib import Path
from typing import Any

import mindspore
import pytest

from tests.e2e.jobs import Outcome, identical
from tests.mindspore.conftest import train

SCRIPT = Path(__file__).parent / "parts_job.py"
STEPS = ("--steps", "30")


def job(where: Path, *specs: str, more: tuple[str, ...] = (), **how: Any) -> Outcome:
    """
    Run the script on four ranks with these faults.
    """
    options = [word for spec in specs for word in ("--chaos", spec)]
    return train(where, *options, *more, script=SCRIPT, arguments=STEPS, **how)


@pytest.fixture(scope="module")
def calm_parts(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of the script without a fault.
    """
    outcome = job(tmp_path_factory.mktemp("parts") / "calm")
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.soak
def test_shards_come_from_their_replicas(tmp_path: Path, calm_parts: Outcome) -> None:
    """When ranks of both shards die or report memory faults, one at a time or one rank of each
    shard at once, then losses and final state are those of the undisturbed run."""
    outcome = job(
        tmp_path / "run",
        "kill:rank=1,step=6,phase=update",
        "kill:ranks=0+3,step=12,phase=forward",
        "raise:rank=2,step=18,phase=update,kind=memory",
        "kill:rank=2,step=24,phase=collective",
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, calm_parts)
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover", "retry", "recover"]
    assert [i["steps_lost"] for i in outcome.incidents] == [0, 0, 0, 0]


@pytest.mark.soak
def test_the_job_ends_without_checkpoint_when_a_shard_has_no_holder(tmp_path: Path) -> None:
    """When both holders of a shard are lost at once and there is no checkpoint, then the job ends,
    names the lost shard, and leaves no checkpoint that lacks it."""
    outcome = job(tmp_path / "run", "kill:ranks=0+2,step=12")
    assert outcome.code == 4, outcome.output
    assert "'optimizer.0'" in outcome.report["why"]
    places = tmp_path / "run" / "checkpoints"
    assert not places.exists() or list(places.iterdir()) == []


@pytest.mark.soak
def test_every_shard_is_in_the_last_checkpoint(tmp_path: Path, calm_parts: Outcome) -> None:
    """When a rank is lost and only a last checkpoint is allowed, then each shard is a checkpoint of
    MindSpore's own, and --resume trains on bit for bit."""
    more = ("--enable", "dump")
    outcome = job(tmp_path / "run", "kill:rank=1,step=15,phase=forward", more=more)
    assert outcome.code == 3, outcome.output
    found = {
        path.stem: set(mindspore.load_checkpoint(str(path)))
        for path in (tmp_path / "run").rglob("*.ckpt")
    }
    assert set(found) == {"dense", "optimizer.0", "optimizer.1"}
    assert "global_step" in found["dense"]
    assert "moment1.0.weight" in found["optimizer.0"]
    assert "0.bias" in found["optimizer.1"]
    resumed = job(tmp_path / "run", more=(*more, "--resume"))
    assert resumed.code == 0, resumed.output
    identical(resumed, calm_parts)
