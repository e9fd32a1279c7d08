"""
Jobs on a real device, with ranks killed and memory faults reported: the state at the end is that of
the undisturbed job on every rank. Run them with `make test-accelerator`.

Rows over gloo share one device. Rows over the device's own backend, such as nccl, need a device for
each rank.
"""

from pathlib import Path

import pytest
import torch

from tests.e2e.jobs import ROOT, Outcome, identical, run

SCRIPT = ROOT / "tests" / "accelerator" / "train.py"
DEVICES = torch.accelerator.device_count()
NONE = "there is no accelerator on this machine: run `make test-accelerator` on one that has one"
FAULTS = (
    "kill:rank=0,step=5,phase=forward", "kill:rank=1,step=10,phase=backward",
    "kill:rank=0,step=15,phase=update", "kill:rank=1,step=20,phase=between",
    "raise:rank=1,step=25,phase=update,kind=memory",
    "raise:rank=0,step=30,phase=backward,kind=network",
)  # fmt: skip

pytestmark = pytest.mark.skipif(not DEVICES, reason=NONE)


def trained(where: Path, world: int, *specs: str, arguments: tuple[str, ...] = ()) -> Outcome:
    """
    Run a job on the device with these faults, check that its exit code is 0, and return it.
    """
    options = [word for spec in specs for word in ("--chaos", spec)]
    outcome = run(where, *options, script=SCRIPT, arguments=arguments, nproc=world, limit=300)
    assert outcome.code == 0, outcome.output
    return outcome


@pytest.mark.timeout(900)
@pytest.mark.parametrize("spec", FAULTS)
def test_ranks_that_share_a_device_over_gloo_recover(tmp_path: Path, spec: str) -> None:
    """When two ranks share one device and one of them is killed or reports a fault, then the state
    is that of the undisturbed job."""
    calm = trained(tmp_path / "calm", 2, arguments=("--gloo",))
    identical(trained(tmp_path / "run", 2, spec, arguments=("--gloo",)), calm)


@pytest.mark.timeout(900)
def test_one_rank_trains_over_the_backend_of_the_device(tmp_path: Path) -> None:
    """When a job of one rank reports lost memory outside of its state, then it retries over the
    backend of its device, without a new process."""
    calm = trained(tmp_path / "calm", 1)
    outcome = trained(tmp_path / "run", 1, "raise:rank=0,step=10,phase=backward,kind=network")
    identical(outcome, calm)
    assert [i["strategy"] for i in outcome.incidents] == ["retry"]


@pytest.mark.timeout(900)
@pytest.mark.skipif(DEVICES < 2, reason="the backend of a device needs one device for each rank")
@pytest.mark.parametrize("spec", FAULTS)
def test_ranks_with_a_device_each_recover(tmp_path: Path, spec: str) -> None:
    """When two ranks have a device each and one of them is killed or reports a fault, then the
    state is that of the undisturbed job."""
    calm = trained(tmp_path / "calm", 2)
    identical(trained(tmp_path / "run", 2, spec), calm)
