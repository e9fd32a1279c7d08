"""
`tft pause`, `tft resume`, `tft dump` as processes of their own; the test is the controller.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tft import checkpoint
from tft.bus.base import Bus, Heard
from tft.bus.ports import free_address
from tft.bus.zeromq import open_bus
from tft.cli import ask
from tft.config import JobSettings
from tft.launcher.run_directory import job_there, write_job
from tft.protocol.messages import (
    Envelope,
    Lead,
    Message,
    PauseRequested,
    ResumeRequested,
    StopRequested,
)
from tft.protocol.topics import ORDERS, REPORTS


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    """
    A broker for the jobs of this file: where it is.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "tft", "broker"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            yield process.stderr.readline().split()[-1]
        finally:
            process.kill()


class Desk:
    """
    The controller of the job, and the commands that ask it for something.
    """

    def __init__(self, bus: Bus, run_dir: Path) -> None:
        self._bus = bus
        self.run_dir = run_dir

    async def command(self, *words: str) -> asyncio.subprocess.Process:
        """
        Start a command on the job's run directory; it hears the controller when this returns.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tft", words[0], "--run-dir", str(self.run_dir), *words[1:],
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await self._bus.listened(ORDERS)
        return process

    def says(self, state: str, *, incident: int = 0, heard: str = "", check: str = "") -> None:
        """
        What the job does, and whose first report was heard.
        """
        lead = Lead(
            epoch=1,
            heard={heard: 1} if heard else {},
            state=state,
            incident=incident,
            check=check,
        )
        self._bus.publish(ORDERS, lead)

    async def hears(self, kind: type[Message]) -> Envelope:
        """
        The next request of that kind.
        """
        while True:
            match await self._bus.receive():
                case Heard(envelope=envelope) if isinstance(envelope.message, kind):
                    return envelope
                case _:
                    pass


@pytest.fixture
async def desk(tmp_path: Path, broker: str) -> AsyncIterator[Desk]:
    """
    A job of the test's own that runs, as far as anybody who asks can see.
    """
    job = tmp_path.name
    write_job(JobSettings(job=job, run_dir=tmp_path, broker=broker), ["train.py"])
    async with open_bus(broker, job=job, sender="controller/1", topics=[REPORTS]) as bus:
        yield Desk(bus, tmp_path)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    """
    The exit code of a command, and what it said.
    """
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode().splitlines()


def report(run_dir: Path, result: str, why: str = "") -> None:
    """
    The job is over.
    """
    text = json.dumps({"result": result, "why": why, "incidents": []})
    (run_dir / "report.json").write_text(text)


def refused(folder: Path, *words: str) -> str:
    """
    What a command says that is refused before it has asked anybody.
    """
    process = subprocess.run(
        [sys.executable, "-m", "tft", *words],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    return process.stderr


async def test_a_pause_returns_when_the_job_stands_still(desk: Desk) -> None:
    """
    When the controller has heard of a pause, then the command waits until the job is paused.
    """
    command = await desk.command("pause", "--why", "a look at the rack")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    assert isinstance(asked.message, PauseRequested)
    assert (asked.message.why, asked.message.check) == ("a look at the rack", "")
    desk.says("pausing", heard=asked.sender)
    desk.says("paused", heard=asked.sender)
    assert await ended(command) == (0, ["tft: the job stands still; `tft resume` lets it go on"])


async def test_a_request_is_repeated_until_it_is_heard(desk: Desk) -> None:
    """
    When the controller does not acknowledge a request, then it comes again, under its number.
    """
    command = await desk.command("pause")
    desk.says("healthy")
    first, again = await desk.hears(PauseRequested), await desk.hears(PauseRequested)
    assert (again.sender, again.number) == (first.sender, 1)
    desk.says("paused", heard=first.sender)
    assert (await ended(command))[0] == 0


async def test_a_pause_that_has_to_wait_says_for_what(desk: Desk) -> None:
    """
    When an incident is open, then the command says so, and waits for the pause after it.
    """
    command = await desk.command("pause")
    desk.says("repairing", incident=1)
    asked = await desk.hears(PauseRequested)
    desk.says("repairing", incident=1, heard=asked.sender)
    desk.says("paused", incident=1, heard=asked.sender)
    code, said = await ended(command)
    assert code == 0
    assert said[0] == "tft: the job is repairing; it pauses after that"


async def test_a_check_that_passes_returns_when_the_job_goes_on(desk: Desk) -> None:
    """
    When all ranks pass the check, then the job is healthy again by itself, and that is success.
    """
    command = await desk.command("pause", "--check", "lamps")
    desk.says("healthy", incident=3)
    asked = await desk.hears(PauseRequested)
    assert isinstance(asked.message, PauseRequested)
    assert asked.message.check == "lamps"
    for state in ("pausing", "paused"):
        desk.says(state, incident=3, heard=asked.sender)
    for state in ("resuming", "healthy"):
        desk.says(state, incident=3, heard=asked.sender, check="passed")
    sentence = "tft: the check 'lamps' has passed on all ranks; the job is healthy"
    assert await ended(command) == (0, [sentence])


async def test_a_check_that_does_not_pass_is_no_success(desk: Desk) -> None:
    """
    When the check finds something, or cannot be run, then the command exits with 4 and says what.
    """
    command = await desk.command("pause", "--check", "lamps")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    desk.says("paused", heard=asked.sender)
    found = "lamp 3 is out (rank 1)"
    desk.says("freezing", incident=1, heard=asked.sender, check=found)
    desk.says("dumping", incident=1, heard=asked.sender, check=found)
    sentence = f"tft: the check 'lamps' has not passed: {found}; the job is dumping"
    assert await ended(command) == (4, [sentence])


async def test_a_pause_that_a_fault_has_ended_is_no_success(desk: Desk) -> None:
    """
    When the job ends before it has stood still, then the command exits with 4.
    """
    command = await desk.command("pause")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    desk.says("pausing", heard=asked.sender)
    desk.says("freezing", incident=1, heard=asked.sender)
    desk.says("exiting", incident=1, heard=asked.sender)
    code, said = await ended(command)
    assert code == 4
    assert "the job did not pause" in said[-1]


async def test_a_resume_returns_when_the_job_trains_again(desk: Desk) -> None:
    """
    When a paused job is resumed, then the command waits until it is healthy.
    """
    command = await desk.command("resume")
    desk.says("paused")
    asked = await desk.hears(ResumeRequested)
    desk.says("resuming", heard=asked.sender)
    desk.says("healthy", heard=asked.sender)
    assert await ended(command) == (0, ["tft: the job goes on"])


async def test_a_job_that_is_not_paused_is_not_resumed(desk: Desk) -> None:
    """
    When a job trains, then a resume is refused, and nothing is asked of it.
    """
    command = await desk.command("resume")
    desk.says("healthy")
    code, said = await ended(command)
    assert code == 2
    assert said == [f"tft: the job in {desk.run_dir} is not paused: it is healthy"]


async def test_a_dump_returns_when_the_checkpoint_is_there(desk: Desk) -> None:
    """
    When the job has ended with a last checkpoint, then the command names it and exits with 0.
    """
    command = await desk.command("dump")
    desk.says("healthy")
    asked = await desk.hears(StopRequested)
    assert isinstance(asked.message, StopRequested)
    assert asked.message.signal == 0
    final = desk.run_dir / "checkpoints" / "step-00000007"
    checkpoint.partial(final).mkdir(parents=True)
    manifest = checkpoint.manifest(step=7, world=1, adaptor="fake", files=())
    checkpoint.commit(checkpoint.partial(final), final, manifest)
    report(desk.run_dir, "dumped")
    desk.says("ended", heard=asked.sender)
    code, said = await ended(command)
    assert (code, said) == (0, [f"tft: the job has ended with a last checkpoint: {final}"])


async def test_a_dump_that_fails_says_why(desk: Desk) -> None:
    """
    When the job has ended without a checkpoint, then the command exits with 4 and its reason.
    """
    command = await desk.command("dump")
    desk.says("healthy")
    asked = await desk.hears(StopRequested)
    report(desk.run_dir, "failed", "nobody holds shard 'dense'")
    desk.says("ended", heard=asked.sender)
    code, said = await ended(command)
    assert code == 4
    assert said[-1].endswith("without a last checkpoint: nobody holds shard 'dense'")


@pytest.mark.parametrize("command", ["pause", "dump"])
async def test_a_job_that_is_ending_is_asked_for_nothing(desk: Desk, command: str) -> None:
    """
    When a job is about to end, then it is too late, and a sentence says so.
    """
    process = await desk.command(command)
    desk.says("dumping")
    code, said = await ended(process)
    assert code == 2
    assert f"the job in {desk.run_dir} is dumping" in said[-1]


def test_a_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    """
    When no job was ever run there, then that is said at once.
    """
    said = refused(tmp_path, "pause", "--run-dir", "nowhere")
    assert said == "tft: no job runs in nowhere: there is no job.json\n"


def test_a_job_that_is_over_is_refused(tmp_path: Path) -> None:
    """
    When the report is newer than the start of the run, then there is nothing to ask; when it is
    of the run before, then there is.
    """
    write_job(JobSettings(job="j", run_dir=tmp_path, broker="127.0.0.1:1"), ["train.py"])
    report(tmp_path, "completed")
    said = refused(tmp_path, "dump", "--run-dir", ".")
    assert said == "tft: the job in . is over, with the result 'completed'\n"

    os.utime(tmp_path / "report.json", (0, 0))
    assert job_there(tmp_path).job == "j"


def test_nobody_leading_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """
    When no controller speaks, then the command gives up with a sentence that says where it has
    listened.
    """
    monkeypatch.setattr(ask, "_SILENCE", 0.2)
    address = free_address("127.0.0.1")
    write_job(JobSettings(job="j", run_dir=tmp_path, broker=address), ["train.py"])
    assert ask.resume(tmp_path, "a test") == 4
    assert f"nobody has led the job 'j' for 0 s at the broker {address}" in capsys.readouterr().err


def test_a_job_whose_controller_was_started_by_hand_is_found(broker: str, tmp_path: Path) -> None:
    """
    When nobody has made the run directory, then `tft controller` makes it, and writes there where
    its job is, so that it can be asked for something.
    """
    run_dir = tmp_path / "made" / "run"
    command = ["controller", "--job", "hand", "--run-dir", str(run_dir), "--broker", broker]
    with subprocess.Popen([sys.executable, "-m", "tft", *command]) as controller:
        try:
            while not (run_dir / "story.jsonl").exists():
                with pytest.raises(subprocess.TimeoutExpired):  # it has not been refused
                    controller.wait(0.05)
            there = job_there(run_dir)
        finally:
            controller.kill()
    assert (there.job, there.broker) == ("hand", broker)
