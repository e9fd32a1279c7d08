"""
Tests of MindSpore's own launcher, callback and fault handler, all as installed.

msrun starts four workers that train with `Model.train` and `TrainFaultTolerance`. The environment
is that of MindIO's manual. `shim.py` replaces only the parts for Ascend. Each job is compared bit
for bit with a job without faults.
"""

import json
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.jobs import Outcome, strike, until
from tests.mindio.ring import Ring
from tests.mindspore.model import LAST, files, same, told
from tests.mindspore.test_msrun import LIMIT, ended, logs, msrun
from tft.bus.ports import free_address

pytestmark = pytest.mark.timeout(240)  # each process imports MindSpore for itself

JOB = Path(__file__).with_name("stock_job.py")
WORLD, STEPS = 4, 8
MANUAL = "{TTP:1,UCE:1,ARF:1}"
LOST_AT = 4
"""The step in which workers are killed."""


def train(
    run_dir: Path, *, victims: Sequence[int] = (), enable: str = MANUAL
) -> tuple[Outcome, Path]:
    """
    Run a job to its end; return the outcome and the directory of msrun's logs.

    The ranks in `victims` wait in one step. They are killed when all of them have reached it.
    """
    faults = [[victim, LOST_AT, "loop", "killed"] for victim in victims]
    waiting = [run_dir / f"struck-{place}" for place in range(len(victims))]
    keys = {
        "MS_ENABLE_TFT": enable,
        "MINDIO_FOR_MINDSPORE": "1",
        "MS_TFT_IP": "127.0.0.1",
        "MS_TFT_PORT": free_address("127.0.0.1").rpartition(":")[2],
        "TTP_LOG_STDOUT": "0",  # the default
        "OMP_NUM_THREADS": "1",  # the default of `tft run`
    }
    with ExitStack() as opened:
        ring = Ring(WORLD)
        opened.callback(ring.close)
        arguments = (str(JOB), str(run_dir), str(ring.port), str(STEPS), json.dumps(faults))
        job = opened.enter_context(msrun(run_dir, *arguments, keys=keys, options=()))
        until(
            lambda: all(mark.exists() for mark in waiting) or job.process.poll() is not None,
            "workers that wait to be killed",
            LIMIT,
        )
        # if the job has ended early, the check of its outcome reports this
        if job.process.poll() is None:
            for victim in victims:
                strike(job, f"rank-{victim}")
        return ended(job), logs(job, run_dir.parent)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of eight steps on four workers without a fault.
    """
    outcome, _ = train(tmp_path_factory.mktemp("calm") / "run")
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    return outcome


@pytest.mark.soak
@pytest.mark.parametrize(
    "victims",
    [(3,), (0,), (1, 3)],
    ids=["worker-3", "worker-0", "workers-1-and-3"],
)
def test_msrun_with_the_environment_of_the_manual_replaces_workers_that_are_killed(
    victims: tuple[int, ...], tmp_path: Path, calm: Outcome
) -> None:
    """
    When workers are killed with kill -9, then msrun starts each of them again and no other, msrun ends with 0,
    and on all ranks all parameters, moments of the optimizer and losses are those of an undisturbed job.
    """
    outcome, written = train(tmp_path / "run", victims=victims)
    same(outcome, calm)
    assert {len(state) for state in outcome.finals().values()} == {len(calm.finals()[0])}
    assert any("moment" in name for name in calm.finals()[0])
    assert [(strategy, sorted(faults), started) for strategy, faults, started in told(outcome)] == [
        ("recover", [("process", victim) for victim in victims], len(victims))
    ]
    kept = {path.name for path in written.glob("worker_*.0.log")}
    assert kept == {f"worker_{victim}.0.log" for victim in victims}
    # the log files of MindIO are in the directory of msrun's option `--log_dir`
    assert [path for path in written.glob("ttp_log.log.*") if path.stat().st_size]
    # only the log of each process of worker 0 has the groups, as MindSpore's guides say
    for path in written.glob("worker_*.log"):
        told_here = re.findall(r"rank:\d+, report group list: [\d\[\], ]+", path.read_text())
        of_all = ["rank:0, report group list: [0, 1, 2, 3]"]
        assert told_here == (of_all if path.name.startswith("worker_0.") else []), path.name


@pytest.mark.soak
@pytest.mark.parametrize(("victim", "saver"), [(3, 0), (0, 1)])
def test_with_last_checkpoints_only_a_killed_worker_is_one_fault(
    victim: int, saver: int, tmp_path: Path
) -> None:
    """When only `TTP:1` is enabled and a worker is killed, also worker 0, then it is the only fault
    of the incident, no process is started, MindSpore's functions write the last checkpoint of the
    last completed step, and msrun ends with 3."""
    outcome, written = train(tmp_path / "run", victims=[victim], enable=LAST)
    assert outcome.code == 3, outcome.output
    assert told(outcome) == [("dump", [("process", victim)], 0)]
    step = f"ttp_saved_checkpoints-step_{LOST_AT - 1}"
    saved = [f"{step}/rank_{saver}/ttp_rank_{saver}-1_{LOST_AT - 1}.ckpt"]
    assert files(tmp_path / "run" / "last") == saved
    assert list(written.glob("worker_*.0.log")) == []
