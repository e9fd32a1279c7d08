"""
Writes of torch and the adaptor while the disk is full.
"""

import errno
import os
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pluggy
import torch
from tft_pytorch import adaptor
from torch import nn

from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.config import RankSettings
from tft.protocol.messages import Checkpointed, CheckpointFailed
from tft.spi.adaptor import AdaptorSpecs
from tft.worker.periodic import Periodic
from tft.worker.saving import Saving

ROOM = (0, 100, 20_000)
"""The largest size of a file in bytes: none, less than torch writes at once, less than torch writes
of the tensors."""
FULL = f"OSError: {os.strerror(errno.EFBIG)}"


@contextmanager
def full(room: int) -> Iterator[None]:
    """
    Limit the size of every file that this process writes to `room` bytes during the `with` block.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def adopted() -> None:
    """
    Let the adaptor adopt a model of about 160 KiB in this process.
    """
    torch.set_num_threads(1)
    model = nn.Linear(64, 640)
    optimizer = torch.optim.SGD(model.parameters())
    adaptor.tft_adopt({"model": model, "optimizer": optimizer}, None)


def said(does: Callable[[], object], room: int) -> str:
    """
    Call `does` with the file size limit `room` and return the text of its error, or an empty text.

    Only an `Exception` is caught. Any other error reaches the caller.
    """
    try:
        with full(room):
            does()
    except Exception as error:  # noqa: BLE001 (the test asks whether it is an `Exception`)
        return f"{type(error).__name__}: {getattr(error, 'strerror', None) or error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return ""


def hooks(directory: Path, answers: Connection) -> None:
    """
    Call each adaptor hook that writes files with a full disk, and send the errors to `answers`.
    """
    adopted()
    write = adaptor.tft_stage("dense")
    found = [said(lambda: write(directory), room) for room in ROOM]
    found += [said(lambda: adaptor.tft_save(directory, "dense"), room) for room in ROOM]
    names = adaptor.tft_save(directory, "dense")
    found += [said(lambda: adaptor.tft_join(directory, names), room) for room in ROOM[:2]]
    answers.send(found)


def periodic(run_dir: Path, answers: Connection) -> None:
    """
    Write three periodic checkpoints of one rank, with a full disk for the first two, and send the
    reports.
    """
    adopted()
    plugins = pluggy.PluginManager("tft")
    plugins.add_hookspecs(AdaptorSpecs)
    plugins.register(adaptor)
    settings = RankSettings(
        rank=0, world=1, job="j", run_dir=run_dir, broker="h:1", adaptor="pytorch", incarnation=0,
        page=0, host="h", checkpoint_every=2,
    )  # fmt: skip
    told: list[Checkpointed | CheckpointFailed] = []
    by = Periodic(
        settings,
        plugins.hook,
        Saving(plugins.hook),
        lambda word, _: told.append(word),
        lambda _: None,
        threading.Event(),
        dict,
    )
    by.resumed((0, 0))
    for step, room in ((2, ROOM[2]), (4, ROOM[0]), (6, resource.RLIM_INFINITY)):
        with full(room):
            by.stage(step, b"local_state")
            by.finish(0, None)
    answers.send([(each.step, getattr(each, "why", "")) for each in told])


def asked(
    context: ForkServerContext, work: Callable[[Path, Connection], None], directory: Path
) -> object:
    """
    Run `work` in a new process and return the value that the process sends.
    """
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(directory, there), daemon=True)
    process.start()
    there.close()
    try:
        assert here.poll(60.0)
        return here.recv()
    finally:
        process.kill()
        process.join()


def test_full_disk_raises_the_same_ordinary_error_in_each_hook(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """When the disk is full, then each hook that writes a file raises an exception that can be
    caught, with the same sentence each time."""
    assert asked(context, hooks, tmp_path) == [FULL] * 8


def test_next_checkpoint_is_written_when_the_disk_has_room_again(
    context: ForkServerContext, tmp_path: Path
) -> None:
    """When the disk is full at a periodic checkpoint, then the failure is reported. The next
    checkpoint is written if the disk has room again."""
    assert asked(context, periodic, tmp_path) == [(2, FULL), (4, FULL), (6, "")]
    newest = checkpoint.newest(CheckpointStore(directory=tmp_path / "checkpoints"))
    assert newest is not None
    assert checkpoint.verify(newest).step == 6
