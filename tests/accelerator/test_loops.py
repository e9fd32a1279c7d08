"""
Trainings with Lightning and Transformers on a real device: two ranks share it over NCCL. After
kills in each phase, everything that they record is that of the same script under torchrun, without
tft. Rows of a framework that is not installed are skipped.
"""

from pathlib import Path

import pytest
import torch

from tests.accelerator.test_accelerator import NONE

DEVICE = ("--device",)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason=NONE),
    pytest.mark.timeout(900),
]


def test_lightning_on_a_device(tmp_path: Path) -> None:
    """When ranks are killed in each phase of a step, and in a validation, then losses, logged
    metrics, checkpoints and the final state are those of Lightning's own strategy."""
    pytest.importorskip("lightning")
    from tests.lightning.test_incidents import PHASES, chaos, deaths
    from tests.lightning.trainings import differences, plain, protected

    specs = [f"kill:rank={n % 2},step={2 + 3 * n},phase={p}" for n, p in enumerate(PHASES)]
    arguments = (*DEVICE, *deaths("validation:0:0"))
    outcome = protected(tmp_path, chaos(*specs), *arguments)
    assert outcome.code == 0, outcome.output
    assert {(i["strategy"], *i["inexact"]) for i in outcome.incidents} == {("recover",)}
    assert differences(tmp_path / "own", plain(tmp_path / "plain", *DEVICE)) == []


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_transformers_on_a_device(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, precision: str
) -> None:
    """When ranks are killed in steps with accumulated gradients, then losses, logs, checkpoints and
    the final state are those of the plain script."""
    pytest.importorskip("transformers")
    from tests.transformers.test_trainer import MOST, kills, plain_under, same, train

    arguments = (*DEVICE, *MOST, *(["bf16=true"] if precision == "bf16" else []))
    specs = (
        "rank=0,step=3,phase=backward",
        "rank=1,step=7,phase=update",
        "rank=0,step=9,phase=tail",
    )
    outcome = train(tmp_path, arguments, *kills(*(f"kill:{spec}" for spec in specs)))
    assert outcome.code == 0, outcome.output
    assert [(i["strategy"], i["inexact"]) for i in outcome.incidents] == [("recover", [])] * 3
    undisturbed = plain_under(tmp_path_factory, f"device-{precision}", *arguments)
    same(tmp_path / "out", undisturbed, once=("steps",))
