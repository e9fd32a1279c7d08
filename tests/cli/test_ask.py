"""
`tft pause`, `tft resume` and `tft dump` as real processes. The test acts as the controller.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgpack
import pytest

from tft import checkpoint
from tft.bus.base import Bus, Heard
from tft.bus.memory import MemoryBroker
from tft.bus.ports import free_address
from tft.bus.zeromq import open_bus
from tft.cli import ask
from tft.config import JobSettings
from tft.errors import PeerError
from tft.launcher.run_directory import job_there, write_job
from tft.protocol.codec import encode
from tft.protocol.messages import (
    VERSION,
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
    Return the address of a broker for the jobs of this file.
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
    The controller of the job, played by the test, and the commands that send requests to it.
    """

    def __init__(self, bus: Bus, run_dir: Path) -> None:
        self._bus = bus
        self.run_dir = run_dir

    async def command(self, *words: str) -> asyncio.subprocess.Process:
        """
        Start a command on the job's run directory. Returns when the command receives the
        controller's messages.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tft", words[0], "--run-dir", str(self.run_dir), *words[1:],
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await self._bus.listened(ORDERS)
        return process

    def says(self, state: str, *, incident: int = 0, heard: str = "", check: str = "") -> None:
        """
        Publish the state of the job, and acknowledge the first report of a sender.
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
        Return the next request of this kind.
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
    Return a job that looks to a command like a running job.
    """
    job = tmp_path.name
    write_job(JobSettings(job=job, run_dir=tmp_path, broker=broker), ["train.py"])
    async with open_bus(broker, job=job, sender="controller/1", topics=[REPORTS]) as bus:
        yield Desk(bus, tmp_path)


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    """
    Return the exit code of a command and its output.
    """
    _, said = await process.communicate()
    assert process.returncode is not None
    return process.returncode, said.decode().splitlines()


def report(run_dir: Path, result: str, why: str = "") -> None:
    """
    Write the report of a job that is over.
    """
    text = json.dumps({"result": result, "why": why, "incidents": []})
    (run_dir / "report.json").write_text(text)


def refused(folder: Path, *words: str) -> str:
    """
    Return the message of a command that is refused before it sends a request.
    """
    process = subprocess.run(
        [sys.executable, "-m", "tft", *words],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.returncode == 2
    assert process.stderr.count("\n") == 1
    return process.stderr


async def test_pause_command_returns_when_the_job_is_paused(desk: Desk) -> None:
    """When the controller has acknowledged a pause, then the command waits until the job is paused,
    and exits with 0."""
    command = await desk.command("pause", "--why", "a look at the rack")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    assert isinstance(asked.message, PauseRequested)
    assert (asked.message.why, asked.message.check) == ("a look at the rack", "")
    desk.says("pausing", heard=asked.sender)
    desk.says("paused", heard=asked.sender)
    assert await ended(command) == (0, ["tft: the job stands still; `tft resume` lets it go on"])


async def test_request_is_repeated_until_the_controller_acknowledges(desk: Desk) -> None:
    """When the controller does not acknowledge a request, then the command sends the request again
    with the same number."""
    command = await desk.command("pause")
    desk.says("healthy")
    first, again = await desk.hears(PauseRequested), await desk.hears(PauseRequested)
    assert (again.sender, again.number) == (first.sender, 1)
    desk.says("paused", heard=first.sender)
    assert (await ended(command))[0] == 0


async def test_pause_command_reports_the_open_incident_and_waits(desk: Desk) -> None:
    """When an incident is open, then the pause command prints the state of the job and waits for
    the pause after the incident."""
    command = await desk.command("pause")
    desk.says("repairing", incident=1)
    asked = await desk.hears(PauseRequested)
    desk.says("repairing", incident=1, heard=asked.sender)
    desk.says("paused", incident=1, heard=asked.sender)
    code, said = await ended(command)
    assert code == 0
    assert said[0] == "tft: the job is repairing; it pauses after that"


async def test_pause_with_a_passed_check_returns_when_the_job_is_healthy(desk: Desk) -> None:
    """When all ranks pass the check of a pause, then the command waits until the job is healthy
    again, and exits with 0."""
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


async def test_pause_with_a_failed_check_exits_with_4(desk: Desk) -> None:
    """When the check of a pause does not pass, then the command exits with 4 and prints what the
    check found."""
    command = await desk.command("pause", "--check", "lamps")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    desk.says("paused", heard=asked.sender)
    found = "lamp 3 is out (rank 1)"
    desk.says("freezing", incident=1, heard=asked.sender, check=found)
    desk.says("dumping", incident=1, heard=asked.sender, check=found)
    sentence = f"tft: the check 'lamps' has not passed: {found}; the job is dumping"
    assert await ended(command) == (4, [sentence])


async def test_pause_command_exits_with_4_when_the_job_ends_first(desk: Desk) -> None:
    """When the job ends because of a fault before it is paused, then the pause command exits with
    4."""
    command = await desk.command("pause")
    desk.says("healthy")
    asked = await desk.hears(PauseRequested)
    desk.says("pausing", heard=asked.sender)
    desk.says("freezing", incident=1, heard=asked.sender)
    desk.says("exiting", incident=1, heard=asked.sender)
    code, said = await ended(command)
    assert code == 4
    assert "the job did not pause" in said[-1]


async def test_resume_command_returns_when_the_job_is_healthy(desk: Desk) -> None:
    """When a paused job is resumed, then the command waits until the job is healthy, and exits with
    0."""
    command = await desk.command("resume")
    desk.says("paused")
    asked = await desk.hears(ResumeRequested)
    desk.says("resuming", heard=asked.sender)
    desk.says("healthy", heard=asked.sender)
    assert await ended(command) == (0, ["tft: the job goes on"])


async def test_resume_is_refused_when_the_job_is_not_paused(desk: Desk) -> None:
    """When a job is healthy and not paused, then the resume command exits with 2, names the state
    of the job, and sends no request."""
    command = await desk.command("resume")
    desk.says("healthy")
    code, said = await ended(command)
    assert code == 2
    assert said == [f"tft: the job in {desk.run_dir} is not paused: it is healthy"]


async def test_dump_command_names_the_last_checkpoint(desk: Desk) -> None:
    """When the job has ended with a last checkpoint, then the dump command names the checkpoint and
    exits with 0."""
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


async def test_dump_command_prints_the_reason_when_no_checkpoint_was_written(desk: Desk) -> None:
    """When the job has ended without a last checkpoint, then the dump command exits with 4 and
    prints the reason."""
    command = await desk.command("dump")
    desk.says("healthy")
    asked = await desk.hears(StopRequested)
    report(desk.run_dir, "failed", "nobody holds shard 'dense'")
    desk.says("ended", heard=asked.sender)
    code, said = await ended(command)
    assert code == 4
    assert said[-1].endswith("without a last checkpoint: nobody holds shard 'dense'")


@pytest.mark.parametrize(
    ("command", "state"),
    [("pause", "is ending (its state is dumping) and"), ("dump", "is ending already: its")],
)
async def test_request_is_refused_when_the_job_is_dumping(
    desk: Desk, command: str, state: str
) -> None:
    """When the job is already dumping, then a pause or dump command exits with 2 and prints the
    state of the job."""
    process = await desk.command(command)
    desk.says("dumping")
    code, said = await ended(process)
    assert code == 2
    assert f"the job in {desk.run_dir} {state}" in said[-1]


def test_request_is_refused_when_the_run_directory_has_no_job(tmp_path: Path) -> None:
    """When the run directory has no `job.json`, then the command is refused at once, and one
    sentence says so."""
    said = refused(tmp_path, "pause", "--run-dir", "nowhere")
    assert said == (
        "tft: no job runs in nowhere: this directory has no file job.json; name the run directory "
        "of a running job\n"
    )


def test_request_is_refused_when_the_job_is_over(tmp_path: Path) -> None:
    """When the report is newer than the start of the run, then the command is refused. When the
    report is older, it is that of an earlier run, and the job is found."""
    write_job(JobSettings(job="j", run_dir=tmp_path, broker="127.0.0.1:1"), ["train.py"])
    report(tmp_path, "completed")
    said = refused(tmp_path, "dump", "--run-dir", ".")
    assert said == "tft: the job in . is over, with the result 'completed'\n"

    os.utime(tmp_path / "report.json", (0, 0))
    assert job_there(tmp_path).job == "j"


def test_resume_command_gives_up_when_no_controller_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """When no controller sends messages, then the resume command exits with 4 and names the address
    of the broker at which it listened."""
    monkeypatch.setattr(ask, "_SILENCE", 0.2)
    address = free_address("127.0.0.1")
    write_job(JobSettings(job="j", run_dir=tmp_path, broker=address), ["train.py"])
    assert ask.resume(tmp_path, "a test") == 4
    assert (
        f"no controller has led the job 'j' for 0 s at the broker {address}"
        in capsys.readouterr().err
    )


async def test_request_ends_when_the_controller_speaks_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the controller of the job uses another version of the protocol, then each of its messages
    is unreadable. The command nevertheless gives up after the limit, and says both versions."""
    monkeypatch.setattr(ask, "_SILENCE", 0.2)
    write_job(JobSettings(job="j", run_dir=tmp_path, broker="127.0.0.1:1"), ["train.py"])
    envelope = Envelope(job="j", sender="controller/1", number=0, message=Lead(epoch=1, heard={}))
    frame = msgpack.packb({**msgpack.unpackb(encode(envelope)), "v": VERSION + 1})
    broker = MemoryBroker()

    async def speak() -> None:
        while True:
            broker.post(ORDERS, frame)
            await asyncio.sleep(0.01)

    async with broker.open_bus(job="j", sender="ask.1", topics=[ORDERS]) as bus:
        speaking = asyncio.create_task(speak())
        try:
            async with asyncio.timeout(30):
                with pytest.raises(PeerError) as given_up:
                    await ask.Leader(bus, "ask.1", job_there(tmp_path)).speaks()
        finally:
            speaking.cancel()
    said = str(given_up.value)
    assert said.startswith("no controller has led the job 'j' for 0 s at the broker 127.0.0.1:1")
    assert f"uses version {VERSION + 1} of the protocol" in said


def test_controller_started_by_hand_makes_the_run_directory(broker: str, tmp_path: Path) -> None:
    """When the run directory does not exist, then `tft controller` makes it. The controller writes
    the name of the job and the address of the broker there, so that commands find the job."""
    run_dir = tmp_path / "made" / "run"
    command = ["controller", "--job", "hand", "--run-dir", str(run_dir), "--broker", broker]
    with subprocess.Popen([sys.executable, "-m", "tft", *command]) as controller:
        try:
            while not (run_dir / "story.jsonl").exists():
                # the controller still runs, so it has refused nothing
                with pytest.raises(subprocess.TimeoutExpired):
                    controller.wait(0.05)
            there = job_there(run_dir)
        finally:
            controller.kill()
    assert (there.job, there.broker) == ("hand", broker)
