"""
A controller without its bus: how it begins to lead a run, what it tells operators, and its report.
"""

import asyncio
import errno
import os
from pathlib import Path

import pytest

from tft.bus.base import Heard
from tft.bus.memory import MemoryBroker
from tft.config import JobSettings
from tft.controller import service
from tft.controller.service import Controller
from tft.core.job.commands import JobOver, Tell
from tft.core.job.events import Led
from tft.files import read_object
from tft.last_words import last_words
from tft.protocol.messages import Envelope, Lead
from tft.protocol.topics import ORDERS, REPORTS
from tft.replay.recording import Story, runs_of

KILLED = """
{"at":1,"unix":1,"run":"r","opened":1.0,"epoch":1,"world":2,"from_step":0,"first_incident":1}
{"at":2,"unix":2,"state":"healthy","incident":0}
{"at":3,"unix":3,"state":"freezing","incident":1}
{"at":4,"unix":4,"state":"freezing","incident":2}
{"at":5,"unix":5,"sta"""


def settings(run_dir: Path, *, resume: bool = False) -> JobSettings:
    """
    Return the settings of a controller that connects to nothing.
    """
    return JobSettings(job="j", run_dir=run_dir, broker="127.0.0.1:1", resume=resume)


def test_incidents_are_numbered_on_after_a_run_that_was_killed(tmp_path: Path) -> None:
    """When an earlier run in the directory had two incidents and was killed, so that it has no
    report, then the first incident of the next run has the number 3."""
    (tmp_path / "progress.jsonl").write_text(KILLED)
    with Story(tmp_path / "story.jsonl") as story:
        Controller(settings(tmp_path, resume=True), story)

    runs = runs_of((tmp_path / "story.jsonl").read_bytes(), "story")
    assert runs[1].opened.first_incident == 3


def test_suspended_checkpoints_are_a_remark(tmp_path: Path) -> None:
    """When ranks have left, so that no periodic checkpoint is written, then consoles and the report get
    a remark about it."""
    with Story(tmp_path / "story.jsonl") as story:
        controller = Controller(settings(tmp_path), story)
        controller._do(Tell(event="checkpoints_suspended", facts={"ranks": [1], "step": 4}))

    assert '"event": "checkpoints_suspended"' in (tmp_path / "remarks.jsonl").read_text()


OVER = JobOver(result="completed", code=0, why="every rank has finished")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
async def test_report_is_written_when_there_is_room(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the disk has no room for the report, then the controller goes on, says so once, and writes
    the report when there is room."""
    tries = 0
    written = Path.write_text

    def refuse(path: Path, text: str, **how: str) -> int:
        nonlocal tries
        tries += 1
        if tries < 4:
            raise OSError(number, os.strerror(number))
        return written(path, text, **how)

    monkeypatch.setattr(service, "ROOM", 0.01)
    with Story(tmp_path / "story.jsonl") as story:
        controller = Controller(settings(tmp_path), story)
        monkeypatch.setattr(Path, "write_text", refuse)
        controller._do(OVER)
        assert not (tmp_path / "report.json").exists()
        async with asyncio.timeout(10):
            await controller._over.wait()

    assert read_object(tmp_path / "report.json")["result"] == "completed"
    assert (tmp_path / "remarks.jsonl").read_text().count("report_waits") == 1


async def test_report_that_can_never_be_written_is_told(tmp_path: Path) -> None:
    """When the report cannot be written for another reason, then the job ends, and its last words say
    why there is none."""
    (tmp_path / "logs").mkdir()
    with Story(tmp_path / "story.jsonl") as story:
        controller = Controller(settings(tmp_path), story)
        (tmp_path / "report.json").mkdir()
        controller._do(OVER)
        assert controller._over.is_set()

    [word] = last_words(tmp_path)
    assert word.startswith(
        f"the report of the job could not be written to {tmp_path}/report.json: "
    )


async def test_controller_without_room_leads_as_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a controller is started again while the disk is full, then it repeats the `Lead` of the
    earlier one, so that no node gives up, and writes nothing. When there is room, it begins to lead."""
    path, broker, full = tmp_path / "story.jsonl", MemoryBroker(), True
    with Story(path) as story:
        first = Controller(settings(tmp_path), story)
        first._feed(Led(at=1.0, epoch=1))
    before = path.read_bytes()
    monkeypatch.setattr(service, "LEAD", 0.01)
    monkeypatch.setattr(service, "room_lacks", lambda run_dir: "the disk is full" if full else "")
    with Story(path) as story:
        async with (
            broker.open_bus(job="j", sender="node.1/5", topics=[ORDERS]) as node,
            broker.open_bus(job="j", sender="controller/2", topics=[REPORTS]) as bus,
        ):
            waiting = asyncio.create_task(Controller(settings(tmp_path), story)._await_room(bus))
            heard: list[Lead] = []
            async with asyncio.timeout(10):
                while len(heard) < 3:
                    match await node.receive():
                        case Heard(envelope=Envelope(message=Lead() as lead)):
                            heard.append(lead)
                        case _:
                            pass
                assert not waiting.done()
                full = False
                await waiting

    assert {lead.epoch for lead in heard} == {1}
    assert path.read_bytes() == before
