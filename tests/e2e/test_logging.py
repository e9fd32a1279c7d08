"""
Values of `session.log` in real jobs: each step reaches the loggers once, with the bits of an
undisturbed run.
"""

import json
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tft_loggers.wandb import records

from tests.e2e.jobs import ROOT, Job, job, run, strike, until

SCRIPT = ROOT / "tests" / "e2e" / "logged_job.py"
DDP = ROOT / "tests" / "e2e" / "logged_ddp_job.py"
HOW: dict[str, Any] = {"script": SCRIPT, "nproc": 2}  # Any: the arguments of `job`
Values = dict[int, dict[str, str]]


def rows(run_dir: Path) -> list[dict[str, Any]]:  # Any: JSON
    """
    Return the rows that have reached the loggers so far.
    """
    path = run_dir / "values.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def bits(values: dict[str, float]) -> dict[str, str]:
    """
    Return the bits of values, by name.
    """
    return {name: float(value).hex() for name, value in values.items()}


def once(run_dir: Path, steps: int) -> Values:
    """
    Return the bits of the values of each step. Fail the test if a step is missing or comes twice.
    """
    found = rows(run_dir)
    assert [row["step"] for row in found] == [*range(1, steps + 1)]
    return {row["step"]: bits(row["values"]) for row in found}


def undisturbed(directory: Path, steps: int) -> Values:
    """
    Run a job to which nothing happens, and return its values.
    """
    run_dir = directory / "undisturbed"
    outcome = run(
        run_dir, "--adaptor", "fake", "--log", "jsonl",
        arguments=(str(steps), "--seconds", "0"), **HOW,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    return once(run_dir, steps)


def logged(running: Job, step: int) -> None:
    """
    Wait until the values of a step have reached the loggers.
    """
    until(lambda: len(rows(running.run_dir)) >= step, f"step {step} is logged")


def events(directory: Path) -> Iterator[tuple[int, str, float]]:
    """
    Yield step, name and value of everything that TensorBoard reads from a directory. If a file
    begins with the start of a session, what earlier files have from its step on does not count.
    """
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: list[tuple[int, str, float]] = []
    for path in sorted(directory.glob("events.*")):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            if event.session_log.status == SessionLog.START:
                found = [each for each in found if each[0] < event.step]
            found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
    yield from found


def singles(values: Values) -> dict[tuple[int, str], bytes]:
    """
    Return each value of each step in single precision, as TensorBoard keeps it.
    """
    return {
        (step, name): struct.pack("f", float.fromhex(value))
        for step, named in values.items()
        for name, value in named.items()
    }


def shown(run_dir: Path) -> dict[tuple[int, str], bytes]:
    """
    Return what TensorBoard shows of a run. Fail the test if a value of a step comes twice.
    """
    found = list(events(run_dir / "tensorboard"))
    values = {(step, name): struct.pack("f", value) for step, name, value in found}
    assert len(values) == len(found)
    return values


def test_each_step_is_logged_once_whatever_is_killed(tmp_path: Path) -> None:
    """When the rank that logs and the controller are killed, then each step has reached the loggers
    once, with the bits of an undisturbed run beside it."""
    options, arguments = ("--adaptor", "fake", "--log", "jsonl"), ("70", "--seconds", "0.03")
    with (
        job(tmp_path / "struck", *options, arguments=arguments, **HOW) as struck,
        job(tmp_path / "other", *options, arguments=arguments, **HOW) as other,
    ):
        logged(struck, 10)
        strike(struck, "rank-0")
        logged(struck, 30)
        strike(struck, "controller")
        outcome, undisturbed = struck.end(), other.end()
    assert (outcome.code, undisturbed.code) == (0, 0), outcome.output + undisturbed.output
    assert [incident["strategy"] for incident in outcome.incidents] == ["recover"]
    assert once(outcome.run_dir, 70) == once(undisturbed.run_dir, 70)


@pytest.mark.soak
def test_resumed_run_goes_on_with_its_loggers(tmp_path: Path) -> None:
    """When a rank and the controller are killed, and the job is ended and resumed, then each step
    has reached the loggers once. TensorBoard shows each step once."""
    options = ("--adaptor", "fake", "--log", "jsonl,tensorboard")
    run_dir, arguments = tmp_path / "run", ("160", "--seconds", "0.03")
    with job(run_dir, *options, arguments=arguments, **HOW) as running:
        logged(running, 10)
        strike(running, "rank-0")
        logged(running, 30)
        strike(running, "controller")
        logged(running, 50)
        os.kill(running.process.pid, signal.SIGTERM)
        outcome = running.end()
    assert outcome.code == 143, outcome.output
    last = outcome.report["steps"]
    assert len(rows(run_dir)) == last < 160

    with job(run_dir, *options, "--resume", arguments=arguments, **HOW) as running:
        logged(running, last + 5)
        strike(running, "rank-0")
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    expected = undisturbed(tmp_path, 160)
    assert once(run_dir, 160) == expected
    assert shown(run_dir) == singles(expected)


@pytest.mark.soak
def test_return_to_a_checkpoint_sends_corrections(tmp_path: Path) -> None:
    """When the job goes back to a checkpoint before final steps, then only values that differ are
    sent again, and are marked."""
    run_dir = tmp_path / "run"
    outcome = run(
        run_dir, "--adaptor", "fake", "--log", "jsonl", "--checkpoint-every", "20",
        arguments=("80", "--seconds", "0.03", "--polluted", "55"), **HOW,
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    (incident,) = outcome.incidents
    sent = rows(run_dir)
    first = [row for row in sent if not row.get("again")]
    again = [row for row in sent if row.get("again")]
    assert [row["step"] for row in first] == [*range(1, 81)]
    before = sent[sent.index(again[0]) - 1]["step"]  # the newest step that was sent before
    assert incident["step"] == 41 <= before < 55
    assert [row["step"] for row in again] == [*range(41, before + 1)]
    assert all(row["values"] == {"lr": 0.5} for row in again)
    log = (run_dir / "logs" / "controller.log").read_text()
    assert "event=logged_steps_come_again after=40" in log


def by_hand(run_dir: Path, *names: str) -> subprocess.CompletedProcess[str]:
    """
    Send the values of a run to loggers by hand.
    """
    return subprocess.run(
        [sys.executable, "-m", "tft_loggers", str(run_dir), *names],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.soak
def test_values_of_a_run_are_sent_later_by_hand(tmp_path: Path) -> None:
    """When a run was logged to a file, then a command sends its values to another logger, once."""
    expected = undisturbed(tmp_path, 12)
    run_dir = tmp_path / "undisturbed"
    for _ in range(2):
        done = by_hand(run_dir, "tensorboard")
        assert done.returncode == 0, done.stderr
    assert shown(run_dir) == singles(expected)
    assert len(list((run_dir / "tensorboard").iterdir())) == 1
    refused = by_hand(tmp_path, "jsonl")
    assert refused.returncode == 2
    assert "has no values of a run with `tft run --log`" in refused.stderr


STUCK = """
import threading


class Stuck:
    def log(self, step, values, at, *, again):
        threading.Event().wait()

    def last_step(self):
        return None

    def flush(self):
        return True

    def close(self, result):
        pass


def open_logger(job):
    (job.run_dir / "stuck").touch()
    return Stuck()
"""


@pytest.mark.soak
def test_logger_that_is_stuck_ends_no_job(tmp_path: Path) -> None:
    """When the logger of another package never returns, then the job trains and completes, the
    other logger has all values, and the console says what to do about the rest."""
    packages, run_dir = tmp_path / "packages", tmp_path / "run"
    info = packages / "stuck_logger-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "stuck_logger.py").write_text(STUCK)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stuck-logger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[tft.loggers]\nstuck = stuck_logger:open_logger\n")
    outcome = run(
        run_dir, "--adaptor", "fake", "--log", "stuck,tensorboard",
        arguments=("20", "--seconds", "0"), **HOW, environment={"PYTHONPATH": str(packages)},
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert (run_dir / "stuck").exists()
    assert len(once(run_dir, 20)) == len({step for step, _ in shown(run_dir)}) == 20
    log = (run_dir / "logs" / "controller.log").read_text()
    assert "event=values_not_all_sent" in log
    assert "tft: not all values of session.log were sent (the loggers have not" in outcome.output


PHASES = ("forward", "backward", "collective", "update", "between", "tail", "evaluation")


@pytest.fixture(scope="session")
def undisturbed_ddp(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """
    Run a DDP job to which nothing happens, and return its values.
    """
    run_dir = tmp_path_factory.mktemp("ddp") / "run"
    outcome = run(run_dir, "--log", "jsonl", script=DDP, nproc=2, arguments=("40",))
    assert outcome.code == 0, outcome.output
    return once(run_dir, 40)


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", PHASES)
def test_values_are_kept_wherever_in_a_step_a_rank_dies(
    tmp_path: Path, undisturbed_ddp: Values, phase: str, rank: int
) -> None:
    """When a rank is killed in a phase of a step, then each step is logged once, with the bits of
    an undisturbed run."""
    run_dir = tmp_path / "run"
    outcome = run(
        run_dir, "--log", "jsonl", "--chaos", f"kill:rank={rank},step=20,phase={phase}",
        script=DDP, nproc=2, arguments=("40",),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    assert len(outcome.incidents) == 1
    assert once(run_dir, 40) == undisturbed_ddp


# ---------------------------------------------------------------- wandb and MLflow


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    Install wandb and MLflow from the package index into a directory of their own. Skip the test if
    that is not possible.
    """
    directory = tmp_path_factory.mktemp("packages")
    done = subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "--quiet", "--target", str(directory),
            "wandb", "mlflow-skinny",
        ],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"wandb and MLflow cannot be installed: {done.stderr[-300:]}")
    return directory


READ_WANDB = """
import json, sys
from wandb.proto import wandb_internal_pb2 as wandb
found = []
for line in sys.stdin:
    record = wandb.Record.FromString(bytes.fromhex(line))
    if record.WhichOneof("record_type") == "run":
        found.append(record.run.run_id)
    if record.WhichOneof("record_type") == "history":
        items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        found.append({key: json.loads(value) for key, value in items.items()})
print(json.dumps(found))
"""


def in_wandb(run_dir: Path, packages: Path) -> tuple[list[str], list[dict[str, Any]]]:
    """
    Return the ids of the runs and the rows in the offline files of wandb.
    """
    files = sorted(run_dir.glob("wandb/offline-run-*/*.wandb"))
    lines = "".join(f"{each.hex()}\n" for path in files for each in records(path.read_bytes()))
    done = subprocess.run(
        [sys.executable, "-c", READ_WANDB], input=lines, capture_output=True, text=True,
        timeout=60, check=True, env={**os.environ, "PYTHONPATH": str(packages)},
    )  # fmt: skip
    found = json.loads(done.stdout)
    return [each for each in found if isinstance(each, str)], [
        each for each in found if isinstance(each, dict)
    ]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_wandb_and_mlflow_get_each_step_once_in_one_run(tmp_path: Path, packages: Path) -> None:
    """When the rank that logs, the process of the loggers and the controller are killed, then wandb
    and MLflow have one run each, with each step once and the bits of an undisturbed run."""
    store, run_dir = tmp_path / "mlruns", tmp_path / "run"
    with job(
        run_dir, "--adaptor", "fake", "--log", "wandb,mlflow",
        arguments=("200", "--seconds", "0.06"), **HOW,
        environment={
            "PYTHONPATH": str(packages), "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": store.as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true",
        },
    ) as running:  # fmt: skip
        sent = [run_dir / "values" / name / "sent.json" for name in ("wandb", "mlflow")]
        until(lambda: all(path.exists() for path in sent), "both loggers have values", 60)
        strike(running, "rank-0")
        logged(running, len(rows(run_dir)) + 10)
        os.kill(loggers_of(run_dir), signal.SIGKILL)
        logged(running, len(rows(run_dir)) + 20)
        strike(running, "controller")
        outcome = running.end()
    assert outcome.code == 0, outcome.output
    expected = undisturbed(tmp_path, 200)

    runs, history = in_wandb(run_dir, packages)
    assert len(set(runs)) == 1  # the killed process may not have written it
    assert [row["_step"] for row in history] == [*range(1, 201)]
    assert {
        row["_step"]: bits({name: value for name, value in row.items() if name[0] != "_"})
        for row in history
    } == expected

    (directory,) = (path.parent for path in store.glob("*/*/metrics"))
    found: Values = {}
    for path in sorted(directory.glob("metrics/**/*")):
        for line in path.read_text().splitlines() if path.is_file() else ():
            _, value, step = line.split()
            name = str(path.relative_to(directory / "metrics"))
            assert name not in found.setdefault(int(step), {})
            found[int(step)][name] = float(value).hex()
    assert found == expected
    assert "status: 3" in (directory / "meta.yaml").read_text()  # finished


def loggers_of(run_dir: Path) -> int:
    """
    Return the pid of the process of a job's loggers.
    """
    (found,) = (
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if b"tft_loggers" in (words := path.read_bytes()) and os.fsencode(run_dir) in words
    )
    return found
