"""
The package `taskd` without msrun: the settings it reads from msrun's command line, and the cases
that it leaves to msrun.
"""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from taskd.facts import Facts, facts_of

from tft.errors import UsageError


@dataclass(kw_only=True)
class Line:
    """
    The command line of msrun with its own defaults, except for the numbers.
    """

    worker_num: int = 4
    local_worker_num: int = 4
    node_rank: int = -1
    master_addr: str = "127.0.0.1"
    master_port: int = 8118
    sim_level: int = -1
    task_script: str = "train.py"
    task_script_args: list[str] = field(default_factory=lambda: ["--lr", "1"])


def facts(line: Line, **environ: str) -> Facts:
    """
    Return the settings of a job that is no dry run.
    """
    found = facts_of(line, environ)
    assert found is not None
    return found


def test_node_number_is_0_when_all_workers_are_on_one_machine() -> None:
    """When all workers are on this machine, then it is node 0 for any value of --node_rank, as in
    msrun."""
    for node_rank in (-1, 0, 3):
        found = facts(Line(node_rank=node_rank), MS_ENABLE_TFT="{TTP:1}")
        assert (found.nnodes, found.number, found.ranks) == (1, 0, 4)
        assert found.command == ("train.py", "--lr", "1")


def test_number_of_nodes_is_computed_as_in_msrun() -> None:
    """When a machine has two of eight workers, then there are four nodes, and they meet at port
    8119, next to the scheduler's port."""
    found = facts(Line(worker_num=8, local_worker_num=2, node_rank=3, master_addr="10.0.0.1"))

    assert (found.nnodes, found.number, found.ranks) == (4, 3, 2)
    assert (found.address, found.port, found.named) == ("10.0.0.1", 8119, "--master_addr")


def test_address_of_mindio_has_priority_over_the_schedulers_address() -> None:
    """When MS_TFT_IP and MS_TFT_PORT are set, then the nodes meet at that address."""
    there = {"MS_TFT_IP": "10.0.0.9", "MS_TFT_PORT": "30051"}
    found = facts(Line(), **there)

    assert (found.address, found.port, found.named) == ("10.0.0.9", 30051, "MS_TFT_IP")
    for wrong in ("65535", "1023", "0", "x", "²"):
        with pytest.raises(UsageError, match="MS_TFT_PORT must be a port"):
            facts(Line(), **{**there, "MS_TFT_PORT": wrong})


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (Line(worker_num=6, local_worker_num=4), "--local_worker_num is 4 of --worker_num 6"),
        (Line(worker_num=2, local_worker_num=4), "--local_worker_num is 4 of --worker_num 2"),
        (Line(local_worker_num=0), "at least one"),
        (Line(local_worker_num=2), "--node_rank must be 0 to 1 on the 2 machines"),
        (Line(local_worker_num=2, node_rank=2), "but is 2"),
    ],
)
def test_layouts_of_msrun_that_tft_does_not_support_are_refused(line: Line, sentence: str) -> None:
    """When machines have different numbers of workers, or a machine has none, then the job is
    refused, and the message names the option."""
    with pytest.raises(UsageError, match=sentence):
        facts(line)


def test_simulated_run_of_msrun_is_ignored() -> None:
    """When msrun only simulates a job, then tft returns no facts of a job."""
    assert facts_of(Line(sim_level=1), {}) is None
    assert facts_of(Line(), {"MS_SIMULATION_LEVEL": "1"}) is None


@pytest.mark.parametrize(
    ("keys", "adaptor"),
    [("{TTP:1,ARF:1}", "mindio"), ("{TTP:0,RSC:1}", "mindspore"), ("HCCE:1", "mindio")],
)
def test_enabled_features_select_the_adaptor(keys: str, adaptor: str) -> None:
    """When MindSpore is to call mindio_ttp, then the adaptor for mindio_ttp is used. With process
    control alone, the MindSpore adaptor is used."""
    assert facts(Line(), MS_ENABLE_TFT=keys).adaptor == adaptor


@pytest.mark.parametrize(
    ("keys", "more", "orchestrated"),
    [
        ("{TTP:1,UCE:1,ARF:1}", {}, True),
        ("{TTP:1,UCE:1}", {}, False),
        ("{TTP:1,ARF:0}", {}, False),
        ("{TTP:1,UCE:1,ARF:1}", {"MINDX_TASK_ID": "a"}, False),
    ],
)
def test_job_is_orchestrated_on_node_0_when_arf_is_on_without_mindcluster(
    keys: str, more: dict[str, str], orchestrated: bool
) -> None:
    """When ARF is on and MindCluster does not lead the job, then only node 0 starts with
    --orchestrated. MindSpore's handler registers its functions there, in rank 0."""
    assert facts(Line(), MS_ENABLE_TFT=keys, **more).orchestrated is orchestrated
    second = Line(worker_num=8, local_worker_num=4, node_rank=1, master_addr="10.0.0.1")
    assert not facts(second, MS_ENABLE_TFT=keys, **more).orchestrated


def test_import_is_refused_when_another_package_provides_taskd(tmp_path: Path) -> None:
    """When another distribution has a package `taskd`, then the import of tft's `taskd` fails, and
    the message names the other distribution."""
    info = tmp_path / "mindcluster_taskd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindcluster_taskd\nVersion: 1.0\n")
    (info / "RECORD").write_text("taskd/__init__.py,,\ntaskd/api/__init__.py,,\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", "import taskd.api.taskd_agent_api"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "ImportError: mindcluster_taskd 1.0 also has a package taskd" in done.stderr
    assert "uninstall one of them" in done.stderr
