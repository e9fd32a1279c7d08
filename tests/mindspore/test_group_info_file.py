"""
Tests of MindSpore on CPU with `GROUP_INFO_FILE` set, as docs/howto/mindspore_checkpoints.md
describes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mindspore.test_msrun import ended, logs, msrun

MESSAGE = "Invalid communication backend: CPU"
SCRIPT = """
import sys

import mindspore
import numpy
from mindspore import nn, train
from mindspore.dataset import NumpySlicesDataset

mode, parallel = sys.argv[1:]
mindspore.set_context(mode=getattr(mindspore, mode), device_target="CPU")
if parallel == "data_parallel":
    mindspore.communication.init()
mindspore.set_auto_parallel_context(parallel_mode=parallel)
network = nn.Dense(3, 2)
rows = {"x": numpy.ones((8, 3), numpy.float32), "y": numpy.ones((8, 2), numpy.float32)}
optimizer = nn.Adam(network.trainable_params(), 0.01)
model = train.Model(network, nn.MSELoss(), optimizer)
model.train(1, NumpySlicesDataset(rows).batch(4), dataset_sink_mode=False)
print("trained")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """
    Return the path of a program that trains with `Model.train`.
    """
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    "mode", ["PYNATIVE_MODE", pytest.param("GRAPH_MODE", marks=pytest.mark.soak)]
)
def test_a_job_of_one_process_completes_without_group_info_file(
    mode: str, script: Path, tmp_path: Path
) -> None:
    """When the variable is set and the job is not parallel, then the job completes, and there is no
    file."""
    file = tmp_path / "rank_0" / "group_info.pb"
    file.parent.mkdir()
    done = subprocess.run(
        [sys.executable, str(script), mode, "stand_alone"],
        env={**os.environ, "GROUP_INFO_FILE": str(file)},
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "trained"), done.stderr
    assert not file.exists()


@pytest.mark.soak
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "trains"), [("PYNATIVE_MODE", True), ("GRAPH_MODE", False)])
def test_a_data_parallel_job_completes_unless_its_step_is_compiled(
    mode: str, trains: bool, script: Path, tmp_path: Path
) -> None:
    """When the variable is set and two processes are data parallel, then they complete in PyNative
    mode. In graph mode MindSpore ends them as it compiles the step. There is no file."""
    file = tmp_path / "group_info.pb"
    arguments = (str(script), mode, "data_parallel")
    # no variable for fault tolerance is set, so msrun behaves as usual
    keys = {"GROUP_INFO_FILE": str(file)}
    with msrun(tmp_path / "run", *arguments, keys=keys, world=2, words=["--join", "True"]) as job:
        outcome = ended(job)
        said = [path.read_text() for path in logs(job, tmp_path).glob("worker_*.log")]
    assert (outcome.code == 0) is trains
    assert [("trained" in text, MESSAGE in text) for text in said] == [(trains, not trains)] * 2
    assert not file.exists()
