"""
The package `taskd` without msrun: what it makes of msrun's command line, and where it stands aside.
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
    msrun's command line, with its own defaults but for the numbers.
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
    Of a job that is no dry run.
    """
    found = facts_of(line, environ)
    assert found is not None
    return found


def test_one_machine_needs_no_number() -> None:
    """
    When all workers are here, then this is node 0, whatever --node_rank says, as msrun has it.
    """
    for node_rank in (-1, 0, 3):
        found = facts(Line(node_rank=node_rank), MS_ENABLE_TFT="{TTP:1}")
        assert (found.nnodes, found.number, found.ranks) == (1, 0, 4)
        assert found.command == ("train.py", "--lr", "1")


def test_the_nodes_of_several_machines_are_counted_as_msrun_does() -> None:
    """
    When a machine has two of eight workers, then there are four nodes; they meet behind the scheduler's port.
    """
    found = facts(Line(worker_num=8, local_worker_num=2, node_rank=3, master_addr="10.0.0.1"))

    assert (found.nnodes, found.number, found.ranks) == (4, 3, 2)
    assert (found.address, found.port, found.named) == ("10.0.0.1", 8119, "--master_addr")


def test_the_address_of_mindio_goes_before_the_schedulers() -> None:
    """
    When MS_TFT_IP and MS_TFT_PORT are set, then the nodes meet there.
    """
    there = {"MS_TFT_IP": "10.0.0.9", "MS_TFT_PORT": "30051"}
    found = facts(Line(), **there)

    assert (found.address, found.port, found.named) == ("10.0.0.9", 30051, "MS_TFT_IP")
    for wrong in ("65535", "0", "x", "²"):
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
def test_what_msrun_may_do_and_tft_does_not_is_refused(line: Line, sentence: str) -> None:
    """
    When machines have different numbers of workers, or none of their own, then a sentence names the option.
    """
    with pytest.raises(UsageError, match=sentence):
        facts(line)


def test_a_dry_run_is_no_job() -> None:
    """
    When msrun only simulates, then tft has nothing to do with it.
    """
    assert facts_of(Line(sim_level=1), {}) is None
    assert facts_of(Line(), {"MS_SIMULATION_LEVEL": "1"}) is None


@pytest.mark.parametrize(
    ("keys", "adaptor"),
    [("{TTP:1,ARF:1}", "mindio"), ("{TTP:0,RSC:1}", "mindspore"), ("HCCE:1", "mindio")],
)
def test_what_is_switched_on_says_which_adaptor(keys: str, adaptor: str) -> None:
    """
    When MindSpore is to call mindio_ttp, then the adaptor is the one for that; with process control alone,
    MindSpore's.
    """
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
def test_mindspores_handler_is_expected_where_it_registers_with_the_controller(
    keys: str, more: dict[str, str], orchestrated: bool
) -> None:
    """
    When ARF is on and MindCluster does not lead the job, then the job is started with --orchestrated on node 0:
    MindSpore's handler registers its functions there, in rank 0.
    """
    assert facts(Line(), MS_ENABLE_TFT=keys, **more).orchestrated is orchestrated
    second = Line(worker_num=8, local_worker_num=4, node_rank=1, master_addr="10.0.0.1")
    assert not facts(second, MS_ENABLE_TFT=keys, **more).orchestrated


def test_the_real_package_goes_first(tmp_path: Path) -> None:
    """
    When another distribution brings a package `taskd`, then ours is not imported, and says which.
    """
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
    assert "ImportError: mindcluster_taskd 1.0 has a package taskd, too" in done.stderr
    assert "uninstall one of them" in done.stderr
