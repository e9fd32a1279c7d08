"""
Tests of MindSpore's own callback and fault handler, as installed, over `mindio_ttp`.

`shim.py` replaces only the parts for Ascend. Each job is compared bit for bit with a job without
faults.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mindspore
import pytest

from tests.e2e.jobs import Outcome, run
from tests.mindio.ring import Ring
from tests.mindspore.model import LAST, Fault, files, same, told
from tft.bus.ports import free_address

JOB = Path(__file__).with_name("stock_job.py")
SHIM = Path(__file__).with_name("shim.py")
STEPS = 8
IN_PLACE = "{TTP:1,UCE:1,HCCE:1,TSP:1}"
REPLACED = "{TTP:1,UCE:1,HCCE:1,ARF:1}"
UCE = "UCEError occurs in a test"
HCCE = "HCCEError occurs in a test"


def train(
    run_dir: Path, *words: str, faults: Sequence[Fault] = (), enable: str = IN_PLACE
) -> Outcome:
    """
    Run a job of two ranks to its end and return the outcome. `words` are options for `tft run`.
    """
    ring = Ring(2)
    try:
        return run(
            run_dir, "--adaptor", "mindio", *words,
            script=JOB, nproc=2,
            arguments=(str(run_dir), str(ring.port), str(STEPS), json.dumps(list(faults))),
            environment={
                "MS_ENABLE_TFT": enable,
                "MINDIO_FOR_MINDSPORE": "1",
                "MS_TFT_IP": "127.0.0.1",
                "MS_TFT_PORT": free_address("127.0.0.1").rpartition(":")[2],
                "GLOG_v": "2",  # MindSpore's warnings say how its loop has read an error
            },
        )  # fmt: skip
    finally:
        ring.close()


def calls(outcome: Outcome, rank: int, what: str) -> list[dict[str, Any]]:  # Any: JSON
    """
    Return the events of the kind `what` that a rank has recorded.
    """
    lines = (outcome.run_dir / f"calls-rank{rank}.jsonl").read_text().splitlines()
    return [call for call in map(json.loads, lines) if call["what"] == what]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """
    Return the outcome of eight steps on two ranks without a fault.
    """
    outcome = train(tmp_path_factory.mktemp("calm") / "run")
    assert outcome.code == 0, outcome.output
    return outcome


def test_the_shim_is_small_and_gives_a_reason_for_each_replacement() -> None:
    """When the shim is read, then it has at most 60 lines, and a comment gives the reason for each
    replaced name of MindSpore and for each definition, except the two functions that install the
    shim."""
    lines = SHIM.read_text().splitlines()
    assert len(lines) <= 60
    replaced = [line for line in lines if re.match(r"\s+(stock|utils)\.\w+ = ", line)]
    defined = [
        line
        for line in lines
        if re.match(r"\s*(class|def) ", line)
        and not re.match(r"def (install|optimizer)|\s+def construct", line)
    ]
    assert (len(replaced), len(defined)) == (10, 4)
    assert [line for line in replaced + defined if "# replaces " not in line] == []


@pytest.mark.soak
def test_mindspores_own_callback_survives_lost_memory_and_a_failed_link(
    tmp_path: Path, calm: Outcome
) -> None:
    """When memory is lost before an update, and also in an update that the other rank completes,
    and a link fails, then the loop is left as MindSpore leaves it, MindSpore's own repair moves all
    parameters, and losses and final parameters are those of the undisturbed job."""
    faults: list[Fault] = [
        [1, 2, "loop", UCE], [0, 4, "update", "leaving"], [1, 4, "update", UCE],
        [0, 6, "loop", HCCE],
    ]  # fmt: skip
    outcome = train(tmp_path / "run", faults=faults)
    same(outcome, calm, without=[(1, 4)])
    assert told(outcome) == [
        ("retry", [("memory", 1)], 0),
        ("retry", [("memory", 1)], 0),
        ("retry", [("network", 0)], 0),
    ]
    for text in ("HCCEError", "ForceStopError", "STEP FINISH"):
        assert re.search(rf"uce wrapper caught (RuntimeError )?{text}", outcome.output), text
    for rank in (0, 1):
        assert len(calls(outcome, rank, "stop")) == len(calls(outcome, rank, "resume")) == 3
        moved = calls(outcome, rank, "send_recv")
        assert [(call["source"], call["target"]) for call in moved] == [(0, 1), (0, 1)]
        # the training threads of both ranks, which had left the loop, made the transfers
        assert {call["training"] for call in moved} == {True}


@pytest.mark.soak
def test_mindspores_own_functions_write_the_last_checkpoint(tmp_path: Path, calm: Outcome) -> None:
    """When a rank raises an unknown error, then the other rank's MindSpore functions write and name
    the checkpoint of the last completed step, and both leave by MindSpore's own exit."""
    outcome = train(tmp_path / "run", faults=[[1, 4, "loop", "a bug in a test"]], enable=LAST)
    assert outcome.code == 3, outcome.output
    # with only TTP enabled, MindSpore reports interrupted ranks as it reports rank 1
    assert told(outcome) == [("dump", [("software", 1)], 0)]
    last = tmp_path / "run" / "last"
    assert files(last) == ["ttp_saved_checkpoints-step_3/rank_0/ttp_rank_0-1_3.ckpt"]
    found = mindspore.load_checkpoint(str(last / files(last)[0]))
    rows = (calm.run_dir / "steps-rank0.jsonl").read_text().splitlines()
    expected = json.loads(rows[2])["state"]
    assert expected
    assert {name: found[name].asnumpy().tobytes().hex() for name in expected} == expected
    assert int(found["step_num"].asnumpy()) == 3
    for rank in (0, 1):
        assert re.search(rf"rank {rank}\] .*Enter mindio ttp exit process", outcome.output)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_replaced_by_mindspores_own_choice(
    rank: int, tmp_path: Path, calm: Outcome
) -> None:
    """When a process is killed, then the function that MindSpore registers with the controller
    chooses the replacement, the new process runs its own start, and losses and final parameters are
    those of the undisturbed job."""
    faults: list[Fault] = [[rank, 3, "loop", "kill"]]
    outcome = train(tmp_path / "run", "--orchestrated", faults=faults, enable=REPLACED)
    same(outcome, calm)
    assert told(outcome) == [("recover", [("process", rank)], 1)]
    assert "ARF FINISH" in outcome.output
    assert calls(outcome, rank, "send_recv")[0]["source"] == 1 - rank
