"""
Jobs on a real device, with faults and errors of the device: the state at the end is that of the
undisturbed job on every rank. Run them with `make test-accelerator`.

Rows over gloo share one device. Rows over the device's own backend, such as nccl, need a device for
each rank. NCCL shares a device if it takes the ranks for ranks of several hosts (`sharing.py`).
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.jobs import ROOT, Outcome, identical, run, run_once

SCRIPT = ROOT / "tests" / "accelerator" / "train.py"
SHARDED = ROOT / "tests" / "accelerator" / "sharded.py"
DEVICES = torch.accelerator.device_count()
NONE = "there is no accelerator on this machine: run `make test-accelerator` on one that has one"
FAULTS = (
    "kill:rank=0,step=5,phase=forward", "kill:rank=1,step=10,phase=backward",
    "kill:rank=0,step=15,phase=update", "kill:rank=1,step=20,phase=between",
    "raise:rank=1,step=25,phase=update,kind=memory",
    "raise:rank=0,step=30,phase=backward,kind=network",
)  # fmt: skip
EVERY = 10
"""Every byte is compared once in this many steps, and a copy in host memory is made as often."""
FLIPPED = 25
"""The step after which bits flip: copies of steps 10 and 20 are there."""
COMPARED = ("--integrity", str(EVERY), "--backup-every", str(EVERY))
SLOW = ("--gloo", "--seconds", "0.05")
"""With such steps, the digests of a step are compared before many later steps have ended."""
VICTIM, FAILING = 1, 12
"""The rank and the step of the errors that `train.py` makes."""
MIXED = {
    "bfloat16": ("kill:rank=1,step=14,phase=update", "kill:rank=0,step=22,phase=backward"),
    # in step 3 the scale is still too large, so the update is skipped
    "float16": ("kill:rank=1,step=24,phase=update", "kill:rank=0,step=3,phase=backward"),
}
PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")
LEFT_BEHIND = 64 * 2**20
"""Less memory of the device than this, in bytes, is left behind by 20 incidents."""
COUNTED = 5
"""The elements of the all-reduce that a rank skips."""
FORKED = """
import os, sys
from importlib import import_module
import_module(sys.argv[1]).preload()
if not (child := os.fork()):
    import torch
    os._exit(int(torch.ones(3, device=torch.accelerator.current_accelerator()).sum()))
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
"""A process that imports what ranks need, and whose fork computes on the device and exits with 3."""
over_nccl = pytest.mark.skipif(not torch.cuda.is_available(), reason="this row is about NCCL")

pytestmark = [pytest.mark.skipif(not DEVICES, reason=NONE), pytest.mark.timeout(900)]

Calm = Callable[..., Outcome]


def trained(
    where: Path, world: int, *specs: str, arguments: tuple[str, ...] = (), **how: Any
) -> Outcome:
    """
    Run a job on the device with these faults, check its exit code, and return it. `options` are
    further options of `tft run`, `code` is the exit code if it is not 0.
    """
    code, options = how.pop("code", 0), how.pop("options", ())
    chaos = [word for spec in specs for word in ("--chaos", spec)]
    how = {"script": SCRIPT, "limit": 300, **how}
    outcome = run(where, *options, *chaos, arguments=arguments, nproc=world, **how)
    assert outcome.code == code, outcome.output
    return outcome


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """
    Return a function that gives the undisturbed job with this number of ranks and these arguments.
    Each job runs once.
    """

    def undisturbed(world: int, *arguments: str) -> Outcome:
        name = "-".join([str(world), *(word.strip("-") for word in arguments)])
        return run_once(
            tmp_path_factory, name, lambda where: trained(where, world, arguments=arguments)
        )

    return undisturbed


def resumed(where: Path) -> Outcome:
    """
    Resume the job of two ranks in this run directory, and return it.
    """
    return trained(where, 2, options=("--resume",), arguments=("--gloo",))


def faults(outcome: Outcome) -> list[tuple[str, int, int]]:
    """
    Return the kind, the rank and the step of each fault of the job's only incident.
    """
    (incident,) = outcome.incidents
    return [(fault["kind"], fault["rank"], fault["step"]) for fault in incident["faults"]]


# ---------------------------------------------------------------- kills and reported faults


@pytest.mark.parametrize("spec", FAULTS)
def test_ranks_that_share_a_device_over_gloo_recover(tmp_path: Path, calm: Calm, spec: str) -> None:
    """When two ranks share one device and one of them is killed or reports a fault, then the state
    is that of the undisturbed job."""
    outcome = trained(tmp_path / "run", 2, spec, arguments=("--gloo",))
    identical(outcome, calm(2, "--gloo"))
    assert len(outcome.incidents) == 1


def test_one_rank_trains_over_the_backend_of_the_device(tmp_path: Path, calm: Calm) -> None:
    """When a job of one rank reports lost memory outside of its state, then it retries over the
    backend of its device, without a new process."""
    outcome = trained(tmp_path / "run", 1, "raise:rank=0,step=10,phase=backward,kind=network")
    identical(outcome, calm(1))
    assert [i["strategy"] for i in outcome.incidents] == ["retry"]


@pytest.mark.skipif(DEVICES < 2, reason="the backend of a device needs one device for each rank")
@pytest.mark.parametrize("spec", FAULTS)
def test_ranks_with_a_device_each_recover(tmp_path: Path, calm: Calm, spec: str) -> None:
    """When two ranks have a device each and one of them is killed or reports a fault, then the
    state is that of the undisturbed job."""
    identical(trained(tmp_path / "run", 2, spec), calm(2))


# ---------------------------------------------------------------- NCCL among several ranks


@over_nccl
@pytest.mark.parametrize("world", [2, 3])
def test_a_rank_killed_in_each_phase_over_nccl(tmp_path: Path, calm: Calm, world: int) -> None:
    """When a rank is killed in each phase in turn, while the others wait in collectives of NCCL,
    then NCCL is aborted, the survivors keep their processes, and the state is that of the
    undisturbed job."""
    specs = [
        f"kill:rank={turn % world},step={5 * (turn + 1)},phase={phase}"
        for turn, phase in enumerate(PHASES)
    ]
    arguments = ("--apart", "--tail")
    outcome = trained(tmp_path / "run", world, *specs, arguments=arguments)
    identical(outcome, calm(world, *arguments))
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == [("recover", 0)] * 7
    assert all(i["pids_kept"] for i in outcome.incidents)
    assert all(i["processes_started"] == 1 for i in outcome.incidents)


@over_nccl
def test_ranks_are_lost_while_nccl_connects_them(tmp_path: Path, calm: Calm) -> None:
    """When a rank is killed while the communicators of NCCL are made, in which the other ranks wait
    for it without a limit, then they leave, and keep their processes. Reported faults before and
    after that are retried. The state is that of the undisturbed job."""
    specs = (
        "raise:rank=1,step=6,phase=update,kind=memory", "kill:rank=2,phase=repair,order=rebuild",
        "raise:rank=2,step=12,phase=backward,kind=network", "kill:rank=0,step=18,phase=backward",
    )  # fmt: skip
    arguments = ("--apart", "--tail")
    outcome = trained(tmp_path / "run", 3, *specs, arguments=arguments)
    identical(outcome, calm(3, *arguments))
    assert [i["strategy"] for i in outcome.incidents] == ["recover", "retry", "recover"]
    assert [i["processes_started"] for i in outcome.incidents] == [1, 0, 1]


@over_nccl
@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_parts_of_a_model_recover_over_nccl(tmp_path: Path, layout: str) -> None:
    """When four ranks hold a model in two parts, and ranks are killed in each phase, then the parts
    come from the other holders, and the state is that of the undisturbed job."""
    arguments = ("--layout", layout)
    phases = ("forward", "backward", "update", "between")
    specs = [f"kill:rank={n},step={4 + 6 * n},phase={phase}" for n, phase in enumerate(phases)]
    disturbed = trained(tmp_path / "own", 4, *specs, arguments=arguments, script=SHARDED)
    identical(disturbed, trained(tmp_path / "calm", 4, arguments=arguments, script=SHARDED))
    assert [i["strategy"] for i in disturbed.incidents] == ["recover"] * len(phases)


@over_nccl
def test_a_rank_that_skips_a_collective_of_nccl_is_named(tmp_path: Path, calm: Calm) -> None:
    """When a rank does not begin a collective of NCCL, then it is named, with the collective in
    which the devices of the others wait, before a process is ended."""
    arguments = ("--apart", "--error", "skip", "--seconds", "0.1")
    environment = {"TORCH_FR_BUFFER_SIZE": "500", "TORCH_NCCL_TRACE_BUFFER_SIZE": "500"}
    outcome = trained(tmp_path / "run", 3, arguments=arguments, environment=environment)
    identical(outcome, calm(3, "--apart"))
    remarks = outcome.report["remarks"]
    (behind,) = [each["facts"] for each in remarks if each["event"] == "rank_behind"]
    assert behind["rank"] == VICTIM
    assert f"all_reduce of {COUNTED} elements" in behind["why"], behind
    log = (outcome.run_dir / "logs" / "controller.log").read_text()
    assert log.index("event=rank_behind") < log.index("event=stalled")


@over_nccl
def test_incidents_leave_no_memory_of_the_device_behind(tmp_path: Path) -> None:
    """When the groups of NCCL are aborted and formed again many times, then the survivors give
    their memory of the device back."""
    steps = range(4, 100, 4)
    specs = [f"kill:rank=1,step={step},phase=backward" for step in steps]
    arguments = ("--apart", "--free", "--steps", "110")
    options = ("--max-incidents", "100", "--max-rank-faults", "100")
    outcome = trained(tmp_path / "run", 2, *specs, arguments=arguments, options=options)
    assert len(outcome.incidents) == len(steps)
    lines = (outcome.run_dir / "free.txt").read_text().splitlines()
    free = {int(step): int(left) for step, left in map(str.split, lines)}
    assert free[15] - free[109] < LEFT_BEHIND, free


# ---------------------------------------------------------------- errors of the device


def test_a_failed_assertion_of_a_kernel_ends_in_a_checkpoint_that_can_be_resumed(
    tmp_path: Path, calm: Calm
) -> None:
    """When an index on the device is out of range, then the process has lost its device by a bug of
    the script: the other rank saves a last checkpoint, and a resumed job has the state of the
    undisturbed one."""
    arguments = ("--gloo", "--error", "assert")
    outcome = trained(tmp_path / "run", 2, arguments=arguments, code=3)
    assert ("software", VICTIM, FAILING) in faults(outcome)
    assert "device-side assert triggered" in outcome.incidents[0]["faults"][0]["evidence"]
    assert outcome.report["result"] == "dumped"
    identical(resumed(tmp_path / "run"), calm(2, "--gloo"))


def test_an_assertion_that_shows_in_the_reduction_loses_no_state(
    tmp_path: Path, calm: Calm
) -> None:
    """When an assertion of a kernel fails while the gradients are reduced, then any thread of the
    process may be the first to see it. Whether the job ends with a last checkpoint or the process
    is replaced, the state at the end is that of the undisturbed job."""
    where = tmp_path / "run"
    arguments = ("--gloo", "--error", "assert", "--reduced")
    outcome = run(where, script=SCRIPT, arguments=arguments, nproc=2, limit=300)
    assert outcome.code in (0, 3), outcome.output
    assert VICTIM in {rank for _, rank, _ in faults(outcome)}
    identical(outcome if outcome.code == 0 else resumed(where), calm(2, "--gloo"))


def test_a_process_that_has_lost_its_device_is_replaced(tmp_path: Path, calm: Calm) -> None:
    """When an assertion of a kernel fails, and the script says that this is a fault, then another
    process takes the place of the one that has lost its device. The other one goes on."""
    arguments = ("--gloo", "--error", "assert", "--declared")
    outcome = trained(tmp_path / "run", 2, arguments=arguments)
    identical(outcome, calm(2, "--gloo"))
    assert ("process", VICTIM, FAILING) in faults(outcome)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["processes_started"]) == ("recover", 1)
    assert incident["pids_kept"] is True


def test_a_device_without_free_memory_ends_in_a_checkpoint_that_can_be_resumed(
    tmp_path: Path, calm: Calm
) -> None:
    """When the device does not have the memory that a rank asks for, then this is a bug of the
    script: a last checkpoint is saved, and a resumed job has the state of the undisturbed one."""
    arguments = ("--gloo", "--error", "memory")
    outcome = trained(tmp_path / "run", 2, arguments=arguments, code=3)
    assert ("software", VICTIM, FAILING) in faults(outcome)
    assert "out of memory" in outcome.incidents[0]["faults"][0]["evidence"]
    identical(resumed(tmp_path / "run"), calm(2, "--gloo"))


def test_a_request_for_memory_that_counts_as_a_fault_is_retried(tmp_path: Path, calm: Calm) -> None:
    """When the device does not have the memory that a rank asks for, and the script says that this
    is a fault of memory, then the rank takes its state from the other one, in the same process."""
    arguments = ("--gloo", "--error", "memory", "--declared")
    outcome = trained(tmp_path / "run", 2, arguments=arguments)
    identical(outcome, calm(2, "--gloo"))
    assert faults(outcome) == [("memory", VICTIM, FAILING)]
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["processes_started"]) == ("retry", 0)
    assert incident["pids_kept"] is True


def test_a_checkpoint_of_the_survivor_can_be_resumed_on_the_device(
    tmp_path: Path, calm: Calm
) -> None:
    """When a rank is killed in its update, and only a last checkpoint is enabled, then the other
    rank saves it, and a resumed job has the state of the undisturbed one."""
    where = tmp_path / "run"
    spec = "kill:rank=0,step=20,phase=update"
    outcome = trained(where, 2, spec, options=("--enable", "dump"), arguments=("--gloo",), code=3)
    assert [i["strategy"] for i in outcome.incidents] == ["dump"]
    identical(resumed(where), calm(2, "--gloo"))


# ---------------------------------------------------------------- copies that are compared


def test_compared_copies_on_a_device_give_no_alarm(tmp_path: Path, calm: Calm) -> None:
    """When nothing flips, and copies are compared and kept in host memory, then there is no
    incident, and the state is that of the job without both."""
    outcome = trained(tmp_path / "run", 2, options=COMPARED, arguments=SLOW)
    identical(outcome, calm(2, "--gloo"))
    assert outcome.incidents == []
    logs = [path.read_text() for path in (outcome.run_dir / "logs").glob("rank-*.log")]
    assert logs
    assert not any("backup_not_kept" in log for log in logs)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("keys", ["target=param", "target=exp_avg,tensor=2,bits=3"])
def test_flipped_bits_on_a_device_are_undone_and_traced(
    tmp_path: Path, calm: Calm, keys: str, rank: int
) -> None:
    """When bits of a parameter or of a moment flip in the memory of the device, then all ranks
    return to a copy from before, the rank with the wrong copy is named, and the state is that of
    the undisturbed job."""
    spec = f"bitflip:rank={rank},step={FLIPPED},{keys}"
    outcome = trained(tmp_path / "run", 2, spec, options=COMPARED, arguments=SLOW)
    identical(outcome, calm(2, "--gloo"))
    ((kind, named, step),) = faults(outcome)
    assert (kind, named) == ("corruption", rank)
    assert FLIPPED < step <= FLIPPED + EVERY + 1
    (incident,) = outcome.incidents
    assert incident["inexact"] == []
    assert incident["step"] <= FLIPPED
    assert 0 < incident["steps_lost"] <= 2 * EVERY
    assert incident["processes_started"] == 0


# ---------------------------------------------------------------- precision, batches, generators


@pytest.mark.parametrize(
    ("precision", "spec"), [(name, spec) for name, specs in MIXED.items() for spec in specs]
)
def test_mixed_precision_on_a_device_recovers(
    tmp_path: Path, calm: Calm, precision: str, spec: str
) -> None:
    """When a rank is killed in a job that computes in 16 bits, with clipped gradients and for
    float16 with a GradScaler, then the state is that of the undisturbed job, with its scale."""
    arguments = ("--gloo", "--amp", precision)
    outcome = trained(tmp_path / "run", 2, spec, arguments=arguments)
    undisturbed = calm(2, *arguments)
    identical(outcome, undisturbed)
    assert [i["strategy"] for i in outcome.incidents] == ["recover"]
    final = undisturbed.finals()[0]
    assert final["weights"] != calm(2, "--gloo").finals()[0]["weights"]
    lowered = "'scale'" in final["scale"] and str(2.0**28) not in final["scale"]
    assert lowered == (precision == "float16"), final["scale"]


def test_batches_of_workers_in_pinned_memory_recover(tmp_path: Path, calm: Calm) -> None:
    """When a rank is killed that takes its batches from a DataLoader with workers and pinned
    memory, then the state is that of the undisturbed job, with its position in the data."""
    arguments = ("--gloo", "--loader")
    outcome = trained(tmp_path / "run", 2, "kill:rank=1,step=15,phase=update", arguments=arguments)
    identical(outcome, calm(2, *arguments))
    assert [i["strategy"] for i in outcome.incidents] == ["recover"]


def test_digests_cover_the_generator_of_the_device(calm: Calm) -> None:
    """When the device draws one more number, then the digest of the random state changes. Each rank
    has random numbers of its own, and both ranks have the same parameters."""
    finals = calm(2, "--gloo").finals()
    assert all(final["rng"] != final["rng, later"] for final in finals.values())
    assert finals[0]["generator of the device"] != finals[1]["generator of the device"]
    assert finals[0]["weights"] == finals[1]["weights"]


@pytest.mark.parametrize("adaptor", ["tft_pytorch", "tft_torchtitan", "tft_transformers"])
def test_a_process_is_forked_after_the_imports_and_uses_the_device(adaptor: str) -> None:
    """When a process has imported what an adaptor imports early, then it has not touched the device:
    a process that is forked from it can use it."""
    pytest.importorskip("transformers" if adaptor == "tft_transformers" else "torch")
    done = subprocess.run(
        [sys.executable, "-c", FORKED, f"{adaptor}.preload"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.stdout.strip() == "3", done.stdout + done.stderr
