"""
The GPT example on real torch, with ranks killed, hung and broken in every phase.

Each run is compared bit for bit with the undisturbed one. `make test` runs a part of the table that
covers all cases, several incidents per job. `make soak` runs every row of the table in its own job.
"""

import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import GPT_STEPS
from tests.e2e.jobs import ROOT, Outcome, identical, job, reached, run, strike, until

PHASES = ("forward", "backward", "collective", "update", "between")
STEPS = ("--steps", str(GPT_STEPS))


def chaos(*specs: str) -> list[str]:
    """
    Return the options of `tft run` that inject these faults.
    """
    return [word for spec in specs for word in ("--chaos", spec)]


def recovered(incident: dict[str, Any], rank: int, kind: str = "process") -> None:  # Any: JSON
    """
    Check that the incident has one fault, started one new process, kept all others, and lost no
    step.
    """
    assert [(f["kind"], f["rank"]) for f in incident["faults"]] == [(kind, rank)]
    assert incident["strategy"] == "recover"
    assert incident["pids_kept"] is True
    assert incident["processes_started"] == 1
    assert incident["steps_lost"] == 0


def test_a_rank_killed_in_any_phase_leaves_the_losses_unchanged(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank, rank 0 included, is killed in each phase of a step in turn, then each time there
    is one incident, one process is started, and losses and final state are those of the undisturbed
    run."""
    victims = dict(zip(PHASES, (0, 1, 2, 3, 0), strict=True))
    specs = [
        f"kill:rank={rank},step={4 * (turn + 1)},phase={phase}"
        for turn, (phase, rank) in enumerate(victims.items())
    ]
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    assert [(c["phase"], c["rank"], c["step"]) for c in outcome.chaos()] == [
        (phase, rank, 4 * (turn + 1)) for turn, (phase, rank) in enumerate(victims.items())
    ]
    assert len(outcome.incidents) == len(PHASES)
    for incident, (phase, rank) in zip(outcome.incidents, victims.items(), strict=True):
        recovered(incident, rank)
        fault = incident["faults"][0]
        # A rank killed in its update has contributed to all all-reduces, so the others complete the
        # step, unless the incident finds all of them before their windows.
        assert incident["step"] - fault["step"] in ((0, 1) if phase == "update" else (0,))
        assert incident["seconds"]["detect"] is not None


@pytest.mark.soak
def test_a_second_rank_killed_in_the_repair_joins_the_incident(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a survivor, and in another incident the replacement itself, is killed while groups are
    formed, then each incident has two faults, and losses and final state are those of the
    undisturbed run."""
    specs = (
        "kill:rank=1,step=10,phase=forward", "kill:rank=2,step=10,phase=repair",
        "kill:rank=3,step=20,phase=update", "kill:rank=3,step=20,phase=repair",
    )  # fmt: skip
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    first, second = outcome.incidents
    assert [f["rank"] for f in first["faults"]] == [1, 2]
    assert [f["rank"] for f in second["faults"]] == [3, 3]
    for incident in (first, second):
        assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
        assert incident["processes_started"] == 2


@pytest.mark.soak
def test_reported_faults_are_retried_without_a_new_process(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank reports a device memory fault in the middle of its update, and another one a
    broken connection, then every process is kept and the state is copied from a replica."""
    specs = (
        "raise:rank=1,step=10,phase=update,kind=memory",
        "raise:rank=0,step=18,phase=forward,kind=memory",
        "raise:rank=2,step=22,phase=backward,kind=network",
    )
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    kinds = [i["faults"][0]["kind"] for i in outcome.incidents]
    assert kinds == ["memory", "memory", "network"]
    for incident in outcome.incidents:
        assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)
        assert (incident["processes_started"], incident["steps_lost"]) == (0, 0)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "specs",
    [
        pytest.param(("hang:rank=1,step=12,phase=forward",), id="hang", marks=pytest.mark.soak),
        pytest.param(
            ("hang:rank=1,step=12,phase=backward,gil=held", "stop:rank=2,step=20,phase=forward"),
            id="interpreter held, stopped",
        ),
    ],
)
def test_a_rank_that_hangs_or_is_stopped_is_found_and_replaced(
    tmp_path: Path, gpt_undisturbed: Outcome, specs: tuple[str, ...]
) -> None:
    """When a training thread blocks, blocks with the interpreter held, or its process is stopped,
    then that rank is found within the limit, its stack is kept, and losses and final state are
    those of the undisturbed run."""
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS, limit=150)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    assert len(outcome.incidents) == len(specs)
    for rank, incident in enumerate(outcome.incidents, start=1):
        recovered(incident, rank, "hang")
        (fault,) = incident["faults"]
        assert "most recent call first" in fault["evidence"]
        assert "train.py" in fault["evidence"]
        assert incident["seconds"]["detect"] < 30


@pytest.mark.timeout(200)
def test_a_job_that_cannot_recover_is_dumped_and_resumed_bit_for_bit(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When recovery is not enabled and a rank dies in its update, then the survivors save one copy
    of each shard and the exit code is 3. The same command with --resume trains on bit for bit."""
    options = ("--enable", "dump", *chaos("kill:rank=0,step=15,phase=update"))
    outcome = run(tmp_path / "run", *options, arguments=STEPS)
    assert outcome.code == 3, outcome.output
    assert outcome.report["result"] == "dumped"
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["step"], incident["pids_kept"]) == ("dump", 16, None)
    resumed = run(tmp_path / "run", *options, "--resume", arguments=STEPS)
    assert resumed.code == 0, resumed.output
    identical(resumed, gpt_undisturbed)
    assert len(resumed.incidents) == 1


@pytest.mark.timeout(200)
@pytest.mark.soak
def test_a_saver_that_dies_does_not_stop_the_last_checkpoint(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank is killed while the last checkpoint is written, then the others write all of it,
    and it is resumed bit for bit."""
    specs = ("kill:rank=3,step=15,phase=update", "kill:rank=0,phase=repair,order=save")
    options = ("--enable", "dump", *chaos(*specs))
    outcome = run(tmp_path / "run", *options, arguments=STEPS)
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert [f["rank"] for f in incident["faults"]] == [3, 0]
    resumed = run(tmp_path / "run", *options, "--resume", arguments=STEPS)
    assert resumed.code == 0, resumed.output
    identical(resumed, gpt_undisturbed)


@pytest.mark.timeout(200)
@pytest.mark.soak
def test_a_rank_that_dies_too_often_ends_the_job_with_a_last_checkpoint(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank causes more incidents than the limit allows, then the next one ends in a last
    checkpoint, with a message that names the rank. With --resume the job trains on bit for bit."""
    specs = [f"kill:rank=1,step={step},phase=forward" for step in (8, 16, 24)]
    options = ("--max-rank-faults", "2", *chaos(*specs))
    outcome = run(tmp_path / "run", *options, arguments=STEPS)
    assert outcome.code == 3, outcome.output
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "recover", "dump"]
    why_not = {tried["strategy"]: tried["why_not"] for tried in outcome.incidents[-1]["tried"]}
    assert why_not["recover"].startswith("rank 1 was the cause of 3 incidents within 600 s")
    resumed = run(tmp_path / "run", *options, "--resume", arguments=STEPS)
    assert resumed.code == 0, resumed.output
    identical(resumed, gpt_undisturbed)


@pytest.mark.soak
def test_a_paused_training_resumes_bit_for_bit(tmp_path: Path, gpt_undisturbed: Outcome) -> None:
    """When the training is paused and resumed, then it uses the same groups and has the same
    losses."""
    # the training is slowed down, because a command of `tft` takes a second to start
    slowly = chaos("slow:rank=0,step=1,factor=8")
    with job(tmp_path / "run", *slowly, arguments=STEPS) as running:
        until(reached(running, 5), "step 5", limit=60)
        code, said = running.asked("pause")
        assert code == 0, said
        assert running.asked("resume")[0] == 0
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []
    identical(outcome, gpt_undisturbed)


@pytest.mark.soak
def test_a_users_own_bug_is_shown_once_and_dumped(tmp_path: Path) -> None:
    """When the model raises an exception that is no fault, then no process is restarted, the
    traceback is shown once with its rank and step, and the exit code is 3."""
    outcome = run(
        tmp_path / "run", *chaos("raise:rank=2,step=8,kind=bug"), arguments=("--steps", "20")
    )
    assert outcome.code == 3, outcome.output
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("software", 2, 8)]
    assert incident["processes_started"] == 0
    assert outcome.output.count("ValueError: chaos") == 1


@pytest.mark.timeout(240)
@pytest.mark.soak
def test_a_model_of_thirty_million_parameters_survives_the_same_faults(tmp_path: Path) -> None:
    """When the state has a third of a gigabyte, then it is fetched from a replica, and losses and
    final state are those of the undisturbed run."""
    arguments = ("--steps", "6", "--size", "small")
    calm = run(tmp_path / "calm", arguments=arguments, limit=120)
    assert calm.code == 0, calm.output
    outcome = run(
        tmp_path / "run", *chaos("kill:rank=0,step=4,phase=update"), arguments=arguments, limit=120
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    recovered(outcome.incidents[0], 0)


@pytest.mark.soak
def test_the_losses_are_those_of_the_ordinary_script(
    tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When the same training runs under torchrun without tft, then every loss is the same, bit for
    bit."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--standalone",
        str(ROOT / "examples" / "gpt" / "plain.py"), *STEPS, "--out", str(tmp_path),
    ]  # fmt: skip
    subprocess.run(
        command, check=True, timeout=90, cwd=ROOT, capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    plain = Outcome(code=0, output="", run_dir=tmp_path)
    assert plain.rows() == gpt_undisturbed.rows()


# ----------------------------------------------------- all phases, ranks and faults, in `make soak`


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", PHASES)
def test_every_rank_in_every_phase(
    phase: str, rank: int, tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When any rank is killed in any phase, then there is one incident, and losses and final state
    are those of the undisturbed run."""
    outcome = run(
        tmp_path / "run", *chaos(f"kill:rank={rank},step=20,phase={phase}"), arguments=STEPS
    )
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    (incident,) = outcome.incidents
    recovered(incident, rank)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(4))
@pytest.mark.parametrize("second", range(4))
def test_every_rank_as_second_victim(
    first: int, second: int, tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When any rank is killed while another death is repaired, then there is one incident, and
    losses and final state are those of the undisturbed run."""
    specs = (f"kill:rank={first},step=20", f"kill:rank={second},phase=repair")
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)
    assert incident["processes_started"] == 2


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("order", ["stop", "fetch", "rebuild", "rollback"])
def test_a_rank_killed_before_any_order_of_a_repair_joins_the_incident(
    order: str, rank: int, tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank is killed before it carries out any order of a repair, then it joins the
    incident, and losses and final state are those of the undisturbed run. Only the replacement has
    state to fetch."""
    second = 2 if order == "fetch" else rank
    specs = ("kill:rank=2,step=20", f"kill:rank={second},phase=repair,order={order}")
    outcome = run(tmp_path / "run", *chaos(*specs), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)


@pytest.mark.soak
@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("phase", ["forward", "backward", "update", "between"])
def test_every_rank_with_a_memory_fault(
    phase: str, rank: int, tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When any rank reports a device memory fault in any phase, then the step is retried, and
    losses and final state are those of the undisturbed run."""
    spec = f"raise:rank={rank},step=20,phase={phase},kind=memory"
    outcome = run(tmp_path / "run", *chaos(spec), arguments=STEPS)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["pids_kept"]) == ("retry", True)


@pytest.mark.soak
@pytest.mark.timeout(200)
@pytest.mark.parametrize("how", ["hang", "hang-gil", "stop"])
@pytest.mark.parametrize("phase", PHASES)
def test_every_kind_of_hang_in_every_phase(
    how: str, phase: str, tmp_path: Path, gpt_undisturbed: Outcome
) -> None:
    """When a rank hangs in any phase, in any way, then it is named and replaced, and losses and
    final state are those of the undisturbed run."""
    action, _, gil = how.partition("-")
    spec = f"{action}:rank=2,step=20,phase={phase}" + (",gil=held" if gil else "")
    outcome = run(tmp_path / "run", *chaos(spec), arguments=STEPS, limit=150)
    assert outcome.code == 0, outcome.output
    identical(outcome, gpt_undisturbed)
    (incident,) = outcome.incidents
    recovered(incident, 2, "hang")


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_moments_leave_the_losses_unchanged(seed: int, tmp_path: Path) -> None:
    """When ranks and control processes are killed at random moments, some at once, then each run
    ends with the losses and the state of the undisturbed run."""
    chance = random.Random(seed)
    steps = ("--steps", "150")
    calm = run(tmp_path / "calm", arguments=steps)
    targets = ["rank-0", "rank-1", "rank-2", "rank-3", "broker", "controller", "store-0"]
    often = ("--max-rank-faults", "100")  # one rank may be killed many times by chance
    with job(tmp_path / "run", *often, arguments=steps) as running:
        step = 3
        while step < 140:
            until(reached(running, step), f"step {step}", limit=60)
            with suppress(ProcessLookupError):  # the process may be dead and not replaced yet
                strike(running, chance.choice(targets))
            step += chance.choice([0, 1, 5, 20])
        outcome = running.end(200)
    assert outcome.code == 0, outcome.output
    identical(outcome, calm)
    # a step is lost only if all ranks that had completed it are lost
    for incident in outcome.incidents:
        assert incident["steps_lost"] < len(incident["faults"])
