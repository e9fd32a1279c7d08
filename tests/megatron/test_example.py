"""
Tests of the example: the script with tft, with ranks killed, is compared with the ordinary script
under torchrun.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, Outcome, run

EXAMPLE = ROOT / "examples" / "megatron_gpt"
ARGUMENTS = ("--steps", "12", "--without-cuda", str(ROOT / "tests" / "megatron" / "shim.py"))


@pytest.mark.soak
@pytest.mark.timeout(240)  # it runs two jobs
def test_the_example_with_lost_ranks_has_the_losses_of_the_ordinary_script(tmp_path: Path) -> None:
    """When a rank is killed in its update and then rank 0 in its backward pass, then every loss is
    that of the same script without tft."""
    plain = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone",
        str(EXAMPLE / "plain.py"), *ARGUMENTS, "--out", str(tmp_path / "plain"),
    ]  # fmt: skip
    subprocess.run(
        plain, check=True, cwd=ROOT, timeout=100, env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    ordinary = Outcome(code=0, output="", run_dir=tmp_path / "plain")

    outcome = run(
        tmp_path / "run", "--adaptor", "megatron",
        "--chaos", "kill:rank=2,step=4,phase=update", "--chaos", "kill:rank=0,step=8,phase=backward",
        script=EXAMPLE / "train.py", arguments=ARGUMENTS,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert outcome.rows() == ordinary.rows()
    assert len(outcome.rows()) == 4 * 12
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover"]
