"""
Tests of the MindSpore example with real MindSpore, with ranks killed or broken in every phase.

Each run is compared bit for bit with the run without faults. `make test-mindspore` runs a covering
part of the table, with several incidents per job. With `-m soak` it runs every row, one job each.
"""

import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import mindspore
import pytest

from tests.e2e.jobs import Outcome, identical
from tests.mindspore.conftest import train

PHASES = ("forward", "backward", "collective", "update", "between")


def chaos(*specs: str) -> list[str]:
    """
    Return the options of `tft run` for these faults.
    """
    return [word for spec in specs for word in ("--chaos", spec)]


def recovered(incident: dict[str, Any], rank: int) -> None:  # Any: JSON
    """
    Check an incident: one fault, one new process, all other processes kept, no step lost.
    """
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [("process", rank)]
    assert incident["strategy"] == "recover"
    assert incident["pids_kept"] is True
    assert (incident["processes_started"], incident["steps_lost"]) == (1, 0)


def retried(incident: dict[str, Any]) -> None:  # Any: JSON
    """
    Check an incident: all processes kept, no step lost.
    """
    assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)
    assert (incident["processes_started"], incident["steps_lost"]) == (0, 0)


def started(outcome: Outcome) -> dict[tuple[int, int], bool]:
    """
    Return, by rank and incarnation, whether the process was forked from the fork server.
    """
    log = (outcome.run_dir / "logs" / "agent-0.log").read_text()
    lines = [line for line in log.splitlines() if "event=rank_started" in line]
    found: dict[tuple[int, int], bool] = {}
    for line in lines:
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        found[int(facts["rank"]), int(facts["incarnation"])] = line.endswith("how=forked")
    return found


def test_a_rank_killed_in_any_phase_leaves_the_losses_unchanged(
    tmp_path: Path, calm: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a rank, rank 0 included, is killed in each phase of a step in turn, then each time there
    is one incident, one process is forked from the fork server that has MindSpore imported, and
    losses and final state are those of the undisturbed run."""
    victims = dict(zip(PHASES, (0, 1, 2, 3, 0), strict=True))
    specs = [
        f"kill:rank={rank},step={4 * (turn + 1)},phase={phase}"
        for turn, (phase, rank) in enumerate(victims.items())
    ]
    outcome = train(tmp_path / "run", *chaos(*specs))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    assert [(c["phase"], c["rank"]) for c in outcome.chaos()] == list(victims.items())
    assert len(outcome.incidents) == len(PHASES)
    for incident, (phase, rank) in zip(outcome.incidents, victims.items(), strict=True):
        recovered(incident, rank)
        # in phase `update` the all-reduces were complete, so this step counts as completed
        assert incident["step"] == incident["faults"][0]["step"] + (phase == "update")
    changed = outcome.chaos()[3]["evidence"]
    assert 0 < changed["changed"] < changed["of"]
    assert all(started(outcome).values())
    with capsys.disabled():
        sys.stdout.write(f"\n{moments(outcome)}\n")


def moments(outcome: Outcome) -> str:
    """
    Return a text with the duration of each recovery and of importing MindSpore.

    The text is for operators and checks nothing, because the times depend on the machine. Without
    the fork server, each new process would need the import time.
    """
    log = (outcome.run_dir / "logs" / "agent-0.log").read_text()
    times = {
        facts["event"]: datetime.fromisoformat(facts["at"])
        for line in log.splitlines()
        if "=" in line
        for facts in [dict(word.split("=", 1) for word in line.split() if "=" in word)]
        if facts["event"] in ("store_opened", "fork_server_ready")
    }
    imports = (times["fork_server_ready"] - times["store_opened"]).total_seconds()
    seconds = [round(incident["seconds"]["total"], 2) for incident in outcome.incidents]
    return f"from kill to the next step: {seconds} s; importing MindSpore: {imports:.2f} s"


@pytest.mark.soak
def test_a_job_of_two_ranks_survives_the_loss_of_either(tmp_path: Path, calm_pair: Outcome) -> None:
    """When one of two ranks is lost in the middle of its update, and later the other one in a
    collective, then each gets its state from the other, and losses and final state are those of the
    undisturbed run."""
    specs = ("kill:rank=0,step=9,phase=update", "kill:rank=1,step=20,phase=collective")
    outcome = train(tmp_path / "run", *chaos(*specs), nproc=2)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm_pair)
    for incident, rank in zip(outcome.incidents, (0, 1), strict=True):
        recovered(incident, rank)


@pytest.mark.soak
def test_reported_faults_are_retried_without_a_new_process(tmp_path: Path, calm: Outcome) -> None:
    """When a rank reports a device memory fault, in the middle of its update too, another one a
    broken connection, and two ranks report faults at once, then every process is kept and the state
    is copied from a replica."""
    specs = (
        "raise:rank=1,step=6,phase=update,kind=memory",
        "raise:rank=0,step=12,phase=forward,kind=memory",
        "raise:rank=2,step=18,phase=backward,kind=network",
        "raise:rank=1,step=24,phase=forward,kind=memory",
        "raise:rank=3,step=24,phase=forward,kind=memory",
    )
    outcome = train(tmp_path / "run", *chaos(*specs))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    kinds = [incident["faults"][0]["kind"] for incident in outcome.incidents]
    assert kinds[:3] == ["memory", "memory", "network"]
    assert sum(len(incident["faults"]) for incident in outcome.incidents) == 5
    for incident in outcome.incidents:
        retried(incident)


@pytest.mark.soak
def test_two_ranks_killed_at_once_and_a_third_in_the_repair_are_one_incident(
    tmp_path: Path, calm: Outcome
) -> None:
    """When two ranks are killed in the same step, and another one while groups are formed, then
    there is one incident, and losses and final state are those of the undisturbed run."""
    specs = (
        "kill:ranks=1+3,step=12,phase=forward",
        "kill:rank=0,step=12,phase=repair",
    )  # fmt: skip
    outcome = train(tmp_path / "run", *chaos(*specs))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    (incident,) = outcome.incidents
    assert sorted(f["rank"] for f in incident["faults"]) == [0, 1, 3]
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 3)
    assert incident["steps_lost"] == 0


@pytest.mark.timeout(200)
def test_a_last_checkpoint_is_read_by_mindspore_and_resumed(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When recovery is not enabled and a rank dies in its update, then the survivor saves all
    shards and the exit code is 3. Plain MindSpore reads the file, and the same command with
    --resume trains on bit for bit."""
    options = ("--enable", "dump", *chaos("kill:rank=0,step=15,phase=update"))
    outcome = train(tmp_path / "run", *options, nproc=2)
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["step"]) == ("dump", 16)
    (file,) = (tmp_path / "run").rglob("dense.ckpt")
    found = mindspore.load_checkpoint(str(file))
    assert int(found["step_num"].asnumpy()) == 15
    assert int(found["global_step"].asnumpy()[0]) == 15
    assert found["0.weight"].shape == found["moment1.0.weight"].shape == (64, 32)

    resumed = train(tmp_path / "run", *options, "--resume", nproc=2)
    assert resumed.code == 0, resumed.output
    identical(resumed, calm_pair)


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_a_job_that_lost_all_ranks_returns_to_its_newest_checkpoint(
    tmp_path: Path, calm_pair: Outcome
) -> None:
    """When both ranks are killed at once and there are periodic checkpoints, then the job continues
    from the newest, bit for bit."""
    specs = ("kill:ranks=0+1,step=19,phase=forward",)
    outcome = train(tmp_path / "run", "--checkpoint-every", "6", *chaos(*specs), nproc=2)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm_pair)
    assert outcome.incidents[0]["processes_started"] == 2


@pytest.mark.soak
def test_a_users_own_bug_is_shown_once_and_dumped(tmp_path: Path) -> None:
    """When the model raises an exception that is no fault, then no process is restarted, the
    traceback is shown once, and the exit code is 3."""
    outcome = train(
        tmp_path / "run",
        *chaos("raise:rank=1,step=8,kind=bug"),
        nproc=2,
        arguments=("--steps", "12"),
    )
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("software", 1, 8)]
    assert incident["processes_started"] == 0
    assert outcome.output.count("ValueError: chaos") == 1


# ----------------------------------------------------- all phases, ranks and faults, in `make soak`


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
def test_every_rank_in_every_phase(phase: str, rank: int, tmp_path: Path, calm: Outcome) -> None:
    """When any rank is killed in any phase, then there is one incident, and losses and final state
    are those of the undisturbed run."""
    outcome = train(tmp_path / "run", *chaos(f"kill:rank={rank},step=20,phase={phase}"))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    (incident,) = outcome.incidents
    recovered(incident, rank)


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward", "update", "between"])
def test_every_rank_with_a_memory_fault(
    phase: str, rank: int, tmp_path: Path, calm: Outcome
) -> None:
    """When any rank reports a device memory fault in any phase, then the step is retried, and
    losses and final state are those of the undisturbed run."""
    outcome = train(
        tmp_path / "run", *chaos(f"raise:rank={rank},step=20,phase={phase},kind=memory")
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    (incident,) = outcome.incidents
    retried(incident)


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("order", ["stop", "fetch", "regroup", "rebuild", "rollback"])
def test_a_rank_killed_before_any_order_of_a_repair_joins_the_incident(
    order: str, rank: int, tmp_path: Path, calm: Outcome
) -> None:
    """When a rank is killed before it carries out any order of a repair, then it joins the
    incident, and losses and final state are those of the undisturbed run. Only the replacement has
    state to fetch."""
    second = 2 if order == "fetch" else rank
    specs = ("kill:rank=2,step=20", f"kill:rank={second},phase=repair,order={order}")
    outcome = train(tmp_path / "run", *chaos(*specs))
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
