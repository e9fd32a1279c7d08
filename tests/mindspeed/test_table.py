"""
Tests of each kind of fault in a job with MindSpeed-LLM's high availability over `mindio_ttp`.

Losses, parameters, optimizer state, scheduler and data position must equal, bit for bit, those of a
job without a fault.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.mindspeed import llm
from tests.mindspeed.jobs import MODELS, SOURCE, Trained, train

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A fault and the expected strategy."""

    name: str
    faults: tuple[tuple[int, int, str, str], ...]
    """The rank, the step, the place in the step and the text of each fault."""
    strategies: tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()


RETRY, RECOVER = "retry", "recover"
COVERING = Row(
    name="uce-then-kill-then-link",
    faults=(
        (1, 2, "forward", "uce-high"),
        (2, 4, "update", "kill"),
        (3, 6, "forward", "HCCL OP RETRY FAILED"),
    ),
    strategies=(RETRY, RECOVER, RETRY),
    options=(("pace", 0.5),),
)
ROWS = (
    Row(name="uce-high", faults=((2, 4, "forward", "uce-high"),), strategies=(RETRY,)),
    Row(name="uce-high-in-update", faults=((2, 4, "update", "uce-high"),), strategies=(RETRY,)),
    Row(name="uce-low", faults=((1, 4, "forward", "uce-low"),), strategies=(RETRY,)),
    Row(name="link", faults=((2, 4, "reduced", "SUSPECT REMOTE ERROR"),), strategies=(RETRY,)),
    Row(name="kill", faults=((2, 4, "forward", "kill"),), strategies=(RECOVER,)),
    Row(name="kill-in-update", faults=((3, 4, "update", "kill"),), strategies=(RECOVER,)),
    Row(name="kill-rank-0", faults=((0, 4, "reduced", "kill"),), strategies=(RECOVER,)),
    Row(
        name="precision-newest",
        faults=((1, 5, "reduced", "PRECISION ERROR"),),
        strategies=(RETRY,),
        options=(("save_interval", 3),),
    ),
    # The error is raised on all ranks. A rank whose own error names a step waits in a barrier of
    # MindSpeed-LLM.
    Row(
        name="precision-step",
        faults=tuple((rank, 5, "reduced", "PRECISION ERROR load ckpt step=2") for rank in range(4)),
        strategies=(RETRY,),
        options=(("save_interval", 2),),
    ),
)
CASES = [
    ("moe", COVERING),
    pytest.param("dense", COVERING, marks=pytest.mark.soak),
    *(pytest.param(model, row, marks=pytest.mark.soak) for model in MODELS for row in ROWS),
]


OWN_FAULTS = {
    "link": "MindSpeed-LLM up to 2.3.0 adds the steps of a scheduler that it receives to those that it has",
    "precision-newest": "MindSpeed-LLM up to 2.3.0 knows no PRECISION ERROR",
    "precision-step": "MindSpeed-LLM up to 2.3.0 knows no PRECISION ERROR",
}
"""The rows that fail with older versions of MindSpeed-LLM because of a fault in these versions,
with the reason."""


def _named(value: Any) -> str | None:
    return value.name if isinstance(value, Row) else None


@pytest.mark.parametrize(("model", "row"), CASES, ids=_named)
def test_a_job_with_a_fault_ends_as_the_undisturbed_job(
    tmp_path: Path, undisturbed: Callable[[str], Trained], model: str, row: Row
) -> None:
    """When a row's faults happen, then the job recovers by the expected strategy, and ends as the
    job without a fault."""
    if row.name in OWN_FAULTS and SOURCE and llm.is_old(SOURCE):
        pytest.skip(OWN_FAULTS[row.name])
    calm = undisturbed(model)
    options = {**MODELS[model], **dict(row.options), "faults": row.faults}
    trained = train(tmp_path / "job", options)
    assert trained.outcome.code == 0, trained.outcome.output[-8000:]
    assert trained.strategies == list(row.strategies)
    assert len(calm.finals()) == 4
    assert trained.finals() == calm.finals()
    assert trained.losses() == calm.losses()


@pytest.mark.parametrize("model", [pytest.param(model, marks=pytest.mark.soak) for model in MODELS])
def test_a_last_checkpoint_is_resumed(
    tmp_path: Path, undisturbed: Callable[[str], Trained], model: str
) -> None:
    """When a rank raises an error of its own, then the others save a last checkpoint in Megatron's
    format and name it. A job that loads it ends as the job without a fault."""
    calm = undisturbed(model)
    options = {**MODELS[model], "faults": [[1, 5, "forward", "an error of the program's own"]]}
    broken = train(tmp_path / "job", options)
    assert broken.outcome.code == 3, broken.outcome.output[-8000:]
    assert broken.strategies == ["dump"]
    kept = sorted(path.name for path in (tmp_path / "job" / "checkpoints").iterdir())
    assert kept == ["iter_0000004", "latest_checkpointed_iteration.txt"]
    again = tmp_path / "again"
    trained = train(again, {**MODELS[model], "load": str(tmp_path / "job" / "checkpoints")})
    assert trained.outcome.code == 0, trained.outcome.output[-8000:]
    assert trained.finals() == calm.finals()
    later = {key: told for key, told in calm.losses().items() if key[1] > 4}
    assert trained.losses() == later
