"""
Slow ranks in a pipeline of megatron-core: two stages with two replicas each.
"""

from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, job
from tests.e2e.test_stragglers import SINCE, check, named, need_cores

SCRIPT = ROOT / "tests" / "megatron" / "slow_job.py"
OPTIONS = ("--pipeline-parallel", "2", "--without-cuda", "tests/megatron/shim.py")


@pytest.mark.soak
@pytest.mark.parametrize("percent", [30, 100])
@pytest.mark.parametrize("part", ["forward", "backward"])
def test_a_slow_rank_of_a_pipeline_is_named(tmp_path: Path, part: str, percent: int) -> None:
    """When a rank of four becomes slow in its forward or backward passes, in a pipeline of two
    stages, then it is named within 20 steps, and no rank of the other stage is, if each rank has a
    core of its own."""
    need_cores(4)
    steps = ("--steps", str(SINCE + 40))
    arguments = ("2", part, str(percent), str(SINCE), *steps, *OPTIONS)
    with job(
        tmp_path / "run", "--adaptor", "megatron", script=SCRIPT, arguments=arguments
    ) as running:
        check(named(running), 2, part)
