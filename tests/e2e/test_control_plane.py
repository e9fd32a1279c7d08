"""
The loss of any process, whether it is a rank or a part of tft: real processes and signals with the
fake adaptor.
"""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.e2e.conftest import FAKE, FAKE_STEPS
from tests.e2e.jobs import (
    Outcome,
    identical,
    job,
    left_behind,
    reached,
    run,
    strike,
    until,
)
from tft.config import RankSettings
from tft.page import Page
from tft.replay.judging import replay
from tft.replay.recording import runs_of

LIMIT = 60.0


def fast(run_dir: Path, *options: str, steps: int = FAKE_STEPS, more: tuple[str, ...] = ()):  # type: ignore[no-untyped-def] # returns the context manager of `job`
    """
    Start the fast job of four ranks.
    """
    return job(run_dir, "--adaptor", "fake", *options, script=FAKE, arguments=(str(steps), *more))


@pytest.mark.parametrize(
    "part", ["broker", "controller", pytest.param("store-0", marks=pytest.mark.soak)]
)
def test_a_killed_broker_controller_or_store_is_restarted_in_training(
    part: str, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When the broker, the controller or the store is killed while the job trains, then losses and
    final state are those of the undisturbed run, and the story can be replayed."""
    with fast(tmp_path / "run") as running:
        until(reached(running, 20), "step 20")
        before = running.pid(part)
        strike(running, part)
        until(lambda: running.pid(part) != before, f"a new {part}")
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    assert_told(outcome)


@pytest.mark.parametrize(
    ("part", "kills"),
    [
        ("agent-0", True),
        *(
            pytest.param(part, kills, marks=pytest.mark.soak)
            for part, kills in [
                ("controller", True),
                ("controller", False),
                ("agent-0", False),
                ("broker", True),
                ("broker", False),
                ("store-0", True),
                ("store-0", False),
            ]
        ),
    ],
)
def test_a_stopped_part_is_continued(
    part: str, kills: bool, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a part of tft is stopped (SIGSTOP) and nobody continues it, then its parent does, and the
    job ends as the undisturbed one. A rank that is killed meanwhile is recovered without a loss."""
    with fast(tmp_path / "run", more=("--seconds", "0.03")) as running:
        until(reached(running, 20), "step 20")
        before = running.pid(part)
        os.kill(before, signal.SIGSTOP)
        if kills:
            strike(running, "rank-1")
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    assert running.pid(part) == before
    identical(outcome, fake_undisturbed)
    assert [(i["strategy"], i["steps_lost"]) for i in outcome.incidents] == (
        [("recover", 0)] if kills else []
    )
    log = (outcome.run_dir / "logs" / "agent-0.log").read_text()
    assert f"the {part} was stopped" in outcome.output or "store_continued" in log
    assert_told(outcome)


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """
    Freeze a process, as a debugger does. Skip the test if this machine does not allow it.
    """
    freezer = [sys.executable, str(Path(__file__).with_name("frozen.py")), str(pid)]
    with subprocess.Popen(freezer, stdout=subprocess.PIPE, text=True) as process:
        try:
            told = process.stdout.readline().strip() if process.stdout else ""
            if told != "frozen":
                pytest.skip(f"a process cannot be frozen here: {told}")
            yield
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("part", "kills"),
    [
        ("controller", True),
        *(
            pytest.param(part, kills, marks=pytest.mark.soak)
            for part, kills in [
                ("controller", False),
                ("broker", True),
                ("broker", False),
                ("store-0", True),
                ("store-0", False),
            ]
        ),
    ],
)
def test_a_part_that_hangs_is_replaced(
    part: str, kills: bool, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a part of tft is frozen, so that SIGCONT does not help, then its parent kills it and starts
    another one, and the job ends as the undisturbed one. A rank that is killed meanwhile is
    recovered without a loss."""
    with fast(tmp_path / "run", more=("--seconds", "0.03")) as running:
        until(reached(running, 20), "step 20")
        before = running.pid(part)
        with frozen(before):
            if kills:
                strike(running, "rank-1")
            until(lambda: running.pid(part) != before, f"a new {part}", LIMIT)
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    assert sum(incident["steps_lost"] for incident in outcome.incidents) == 0
    assert {i["strategy"] for i in outcome.incidents} <= {"recover", "retry"}
    log = (outcome.run_dir / "logs" / "agent-0.log").read_text()
    assert f"the {part} has not run for 15 s: it is killed" in outcome.output or (
        "store_hangs" in log
    )
    assert_told(outcome)


@pytest.mark.soak
def test_an_agent_that_hangs_is_named_and_goes_on(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When an agent is frozen for longer than a part may hang, then the launcher says so and does not
    kill it, because its ranks would die with it. When it goes on, a rank that was killed meanwhile
    is recovered without a loss."""
    with fast(tmp_path / "run", more=("--seconds", "0.03")) as running:
        until(reached(running, 20), "step 20")
        with frozen(running.pid("agent-0")):
            strike(running, "rank-1")
            said = "the agent-0 has not run for 15 s: until it does, tft cannot act on this node"
            until(lambda: said in running.output(), "the sentence", LIMIT)
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)


@pytest.mark.parametrize(
    "at", [0.5, *(pytest.param(at, marks=pytest.mark.soak) for at in (0.2, 1.0))]
)
def test_ranks_save_a_last_checkpoint_when_the_story_is_damaged(
    at: float, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a line of the story is damaged, in the middle or at its end, and the controller dies, then
    the survivors save a last checkpoint and the reason names the damage. With --resume the job ends
    with losses and state of the undisturbed run."""
    with fast(tmp_path / "run", more=("--seconds", "0.03")) as running:
        until(reached(running, 20), "step 20")
        os.kill(running.pid("controller"), signal.SIGSTOP)
        story = running.run_dir / "story.jsonl"
        lines = story.read_bytes().splitlines(keepends=True)
        number = int(at * (len(lines) - 1))
        lines[number] = lines[number][:-20] + b"\0" * 19 + b"\n"
        story.write_bytes(b"".join(lines))
        strike(running, "controller")
        outcome = running.end(LIMIT)
    assert (outcome.code, outcome.report["result"]) == (3, "dumped"), outcome.output
    assert "the story of the run is damaged, and " in outcome.report["why"]
    story.unlink()
    resumed = run(
        tmp_path / "run", "--adaptor", "fake", "--resume", script=FAKE, arguments=(str(FAKE_STEPS),)
    )
    identical(resumed, fake_undisturbed)


@pytest.mark.parametrize("place", ["script", "exit", "down"])
def test_late_signal_fails_the_job_only_where_it_may_have_lost_something(
    place: str, tmp_path: Path
) -> None:
    """When a rank is killed after `session.run`, then the job fails if the script of the rank had not
    ended. It is completed, and says so, if Python was only taking the process down."""
    with fast(tmp_path / "run", steps=5, more=("--late", f"2,{place}")) as running:
        outcome = running.end(LIMIT)
    if place == "down":
        why = "rank 2 was ended by signal 9 after its script had ended: only files"
        assert (outcome.code, outcome.report["result"]) == (0, "completed")
        assert sorted(outcome.finals()) == [0, 1, 2, 3]
    else:
        why = "rank 2 was ended by signal 9 before its script had ended"
        assert (outcome.code, outcome.report["result"]) == (4, "failed")
    assert why in outcome.report["why"]
    assert why in outcome.output
    assert_told(outcome)


def assert_told(outcome: Outcome) -> None:
    """
    Check that the story in the run directory is complete.

    A replay of the story must give the same commands, the same result and the same incidents.
    """
    story = outcome.run_dir / "story.jsonl"
    judged = replay(runs_of(story.read_bytes(), str(story), -1)[1])
    assert judged.same, judged.differences[:1] or judged.failure
    assert judged.result == (outcome.report["result"], outcome.code)
    assert judged.incidents == [
        (incident["strategy"], incident["step"], incident["steps_lost"])
        for incident in outcome.incidents
    ]


@pytest.mark.soak
@pytest.mark.parametrize("part", ["broker", "controller"])
def test_a_rank_is_recovered_when_the_broker_or_controller_dies_too(
    part: str, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a rank and the broker, or the controller, are killed at once, then the recovery waits
    for the restarted broker or controller, and has the same result."""
    with fast(tmp_path / "run") as running:
        until(reached(running, 20), "step 20")
        strike(running, part)
        strike(running, "rank-1")
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert (incident["strategy"], incident["steps_lost"]) == ("recover", 0)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_are_unchanged_by_kills_at_random_moments(
    seed: int, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When ranks and control processes are killed at random moments, then each run ends with the
    losses and the state of the undisturbed run, and its story can be replayed."""
    chance = random.Random(seed)
    targets = ["rank-0", "rank-1", "rank-2", "rank-3", "broker", "controller", "store-0"]
    with fast(tmp_path / "run") as running:
        step = 5
        while step < FAKE_STEPS - 10:
            until(reached(running, step), f"step {step}")
            with suppress(ProcessLookupError):  # the process may be dead and not replaced yet
                strike(running, chance.choice(targets))
            step += chance.choice([0, 1, 10, 30])
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    assert_told(outcome)
    # a step is lost only if all ranks that had completed it are lost
    for incident in outcome.incidents:
        assert incident["steps_lost"] < max(1, len(incident["faults"]))


@pytest.mark.parametrize("part", ["run", pytest.param("agent-0", marks=pytest.mark.soak)])
def test_no_process_is_left_two_seconds_after_launcher_or_agent_are_killed(
    part: str, tmp_path: Path
) -> None:
    """When `tft run`, or its agent, is killed with kill -9, then no process of the job is left on
    the node two seconds later. When only the agent is killed, the job ends as failed."""
    with fast(tmp_path / "run", steps=100_000) as running:
        until(reached(running, 20), "step 20")
        assert len(left_behind(running.run_dir)) >= 9
        strike(running, part)
        if part == "run":
            until(lambda: left_behind(running.run_dir) == [], "an empty node", limit=2.0)
        else:
            ranks = [running.pid(f"rank-{r}") for r in range(4)]
            until(lambda: not any(map(_lives, ranks)), "no rank", limit=2.0)
            assert running.end(LIMIT).code == 4
            until(lambda: left_behind(running.run_dir) == [], "an empty node", limit=2.0)


def _lives(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak)],
)
def test_a_signal_saves_a_last_checkpoint_and_resume_continues(
    number: int, code: int, tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When `tft run` gets a signal to stop, then it saves a last checkpoint, ends with the signal's
    code and leaves no process. The same command with --resume trains on without a difference."""
    with fast(tmp_path / "run") as running:
        until(reached(running, 20), "step 20")
        running.process.send_signal(number)
        outcome = running.end(LIMIT)
        until(lambda: left_behind(running.run_dir) == [], "an empty node", limit=2.0)
    assert outcome.code == code, outcome.output
    assert outcome.report["result"] == "cancelled"
    resumed = run(
        tmp_path / "run", "--adaptor", "fake", "--resume", script=FAKE, arguments=(str(FAKE_STEPS),)
    )
    assert resumed.code == 0, resumed.output
    identical(resumed, fake_undisturbed)


def test_a_users_own_bug_ends_in_a_checkpoint_with_its_traceback_shown_once(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a rank raises an exception that is no fault, then no process is restarted, the
    survivors save, the exit code is 3 and the traceback is shown once. If a byte of the checkpoint
    has changed, then --resume names the file, exits 2, and changes no file. Without the bug and with
    the whole checkpoint, --resume continues."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", script=FAKE,
        arguments=(str(FAKE_STEPS), "--bug", "2,30"),
    )  # fmt: skip
    assert outcome.code == 3, outcome.output
    assert outcome.output.count("ValueError: a bug of the user's own") == 1
    assert "rank 2" in outcome.output
    assert outcome.report["result"] == "dumped"
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("software", 2, 30)]
    assert (incident["strategy"], incident["pids_kept"]) == ("dump", None)
    refuse_corrupt_checkpoint(outcome.run_dir)
    resumed = run(
        tmp_path / "run", "--adaptor", "fake", "--resume", script=FAKE, arguments=(str(FAKE_STEPS),)
    )
    assert resumed.code == 0, resumed.output
    identical(resumed, fake_undisturbed)
    assert len(resumed.incidents) == 1


def test_a_process_that_has_lost_its_device_is_replaced(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When an error says that the device accepts no more work from a process, and the rank-local
    state cannot be read any more, then a new process replaces it. The report has one fault, of the
    device's kind, and the job completes as the undisturbed run does."""
    outcome = run(
        tmp_path / "run", "--adaptor", "fake", script=FAKE,
        arguments=(str(FAKE_STEPS), "--device", "2,30"),
    )  # fmt: skip
    assert outcome.code == 0, outcome.output
    identical(outcome, fake_undisturbed)
    (incident,) = outcome.incidents
    assert [(f["kind"], f["rank"], f["step"]) for f in incident["faults"]] == [("memory", 2, 30)]
    assert "uncorrectable ECC error" in incident["faults"][0]["evidence"]
    assert incident["strategy"] == "recover"
    assert incident["pids_kept"] is True


def refuse_corrupt_checkpoint(run_dir: Path) -> None:
    """
    Change a byte of the only checkpoint. Check that --resume is refused, with the name of the file,
    and changes no file. Then change the byte back.
    """
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    saved = checkpoint / "dense.bin"
    whole = saved.read_bytes()
    saved.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    before = _snapshot(run_dir)
    refused = run(run_dir, "--adaptor", "fake", "--resume", script=FAKE)
    assert refused.code == 2
    assert "dense.bin" in refused.output
    assert "Traceback" not in refused.output
    assert _snapshot(run_dir) == before
    saved.write_bytes(whole)


def _snapshot(directory: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.soak
def test_a_process_that_claims_a_held_rank_is_refused(
    tmp_path: Path, fake_undisturbed: Outcome
) -> None:
    """When a process is started by hand with the environment of a rank, then it ends with a message
    that names the holder, and the job trains on."""
    with fast(tmp_path / "run") as running:
        until(reached(running, 10), "step 10")
        told = json.loads((running.run_dir / "job.json").read_text())["settings"]
        page = Page.create()
        claim = RankSettings(
            rank=1, world=4, job=told["job"], run_dir=running.run_dir, broker=told["broker"],
            adaptor="fake", incarnation=0, page=page.fd, host="127.0.0.1",
        )  # fmt: skip
        environment = {**os.environ, **claim.environment()}
        second = subprocess.run(
            [sys.executable, str(FAKE), "5"], env=environment, pass_fds=(page.fd,),
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        page.close()
        assert second.returncode != 0
        assert "RankTaken" in second.stderr
        assert str(running.pid("rank-1")) in second.stderr
        outcome = running.end(LIMIT)
    assert outcome.code == 0, outcome.output
    assert outcome.incidents == []


@pytest.mark.soak
def test_an_ordinary_script_runs_as_under_torchrun(tmp_path: Path) -> None:
    """When a script never calls `tft.init`, then it finds torchrun's variables, its output is
    prefixed and kept, and its exit code is that of the job."""
    script = tmp_path / "ordinary.py"
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    script.write_text(f"import os\nprint(*(os.environ[n] for n in '{names}'.split()))\n")
    outcome = run(tmp_path / "a", "--adaptor", "fake", script=script, arguments=(), nproc=2)
    assert outcome.code == 0, outcome.output
    assert "[rank 1] 1 1 2 2 127.0.0.1" in outcome.output
    assert (outcome.run_dir / "logs" / "rank-1.0.log").read_text().startswith("1 1 2 2")
    script.write_text("raise SystemExit(5)\n")
    outcome = run(tmp_path / "b", "--adaptor", "fake", script=script, arguments=(), nproc=2)
    assert outcome.code == 4, outcome.output
