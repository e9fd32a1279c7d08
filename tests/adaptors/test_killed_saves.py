"""
A checkpoint whose writer process is killed at any moment of the write.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import FrameType

import pytest
import torch
from tft_pytorch import ReplicaOptimizer, adaptor
from torch import nn

from tft import checkpoint
from tft.checkpoint import CheckpointStore

KILLS = 100
"""The number of kills in the long run. Half of them are before the file operation, half after it.
"""
POINTS = 20
"""The least number of different places in the code at which a save is killed. The long run kills at
each place once."""
EARLIER, STEP = 5, 6
TOUCHING = frozenset(
    {"open", "write", "flush", "close", "fsync", "fileno", "rename", "replace", "mkdir", "rmtree",
     "unlink", "remove", "rmdir", "scandir", "stat", "exists", "truncate", "seek"}
)  # fmt: skip
"""Names of functions that touch files, or that are called between such functions."""


class Killer:
    """
    A profile function that kills its own process at the `at`-th file operation.

    The process dies just before the operation starts or just after it returns. With `at=None` the
    function only records all operations.
    """

    def __init__(self, at: int | None, log: Path) -> None:
        self._at = at
        self._log = log
        self._places: list[str] = []

    def __call__(self, frame: FrameType, event: str, function: object) -> None:
        """
        Count this event if it is a file operation, and kill the process if its turn has come.
        """
        name = getattr(function, "__name__", "")
        if event not in ("c_call", "c_return") or name not in TOUCHING:
            return
        place = f"{event} {name} {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        self._places.append(place)
        if len(self._places) == self._at:
            sys.setprofile(None)
            self._log.write_text(place)
            os.kill(os.getpid(), signal.SIGKILL)

    def written(self) -> None:
        """
        Stop profiling and write all recorded operations to the log. This is called only if the
        process was not killed.
        """
        sys.setprofile(None)
        self._log.write_text("\n".join(self._places))


def save(run_dir: Path, step: int, at: int | None, log: Path) -> None:
    """
    Write a checkpoint of one rank, from the first directory to the commit. The steps are those of a
    worker for the orders `save` and `commit`. The process is killed at file operation number `at`.
    """
    torch.manual_seed(step)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    optimizer = ReplicaOptimizer(model.parameters(), torch.optim.AdamW, rank=0, world=2, lr=0.1)
    adaptor.tft_adopt({"model": model, "optimizer": optimizer}, None)
    model(torch.randn(4, 64)).sum().backward()
    optimizer.step()
    killer = Killer(at, log)
    sys.setprofile(killer)
    final = run_dir / "checkpoints" / f"step-{step:08}"
    partial = checkpoint.partial(final)
    partial.mkdir(parents=True, exist_ok=True)
    names = [
        name for shard in ("dense", "optimizer.0") for name in adaptor.tft_save(partial, shard)
    ]
    files = [checkpoint.digest_file(partial, name) for name in names]
    files.append(checkpoint.write_local_state(partial, 0, adaptor.tft_capture(closing=True)))
    files += [checkpoint.digest_file(partial, name) for name in adaptor.tft_join(partial, names)]
    manifest = checkpoint.manifest(step=step, world=2, adaptor="pytorch", files=files)
    checkpoint.commit(partial, final, manifest)
    killer.written()


Save = Callable[[Path, int, int | None], tuple[int | None, list[str]]]


@pytest.fixture
def saving(context: ForkServerContext, tmp_path: Path) -> Save:
    """
    Return a function that saves in a new process.

    It returns the exit code, and the operation at which the process was killed. If the process was
    not killed, it returns all operations.
    """

    def saving(run_dir: Path, step: int, at: int | None) -> tuple[int | None, list[str]]:
        log = tmp_path / "places"
        log.unlink(missing_ok=True)
        process = context.Process(target=save, args=(run_dir, step, at, log))
        process.start()
        process.join()
        return process.exitcode, log.read_text().splitlines()

    return saving


def chosen(places: list[str], kills: int) -> list[int]:
    """
    Choose the operations at which to kill: the first of each kind, then others that are evenly
    spread.
    """
    if not kills:
        places = [" ".join(place.split()[:2]) for place in places]
    first = {place: number for number, place in reversed(list(enumerate(places, start=1)))}
    spread = [1 + kill * (len(places) - 1) // max(1, kills - 1) for kill in range(kills)]
    return list(dict.fromkeys([*first.values(), *spread]))[: max(kills, len(first))]


@pytest.mark.parametrize(
    "again",
    [pytest.param(False, marks=pytest.mark.soak), True],
    ids=["another step", "the same step"],
)
@pytest.mark.parametrize(
    "kills", [0, pytest.param(KILLS // 2, marks=pytest.mark.soak)], ids=["each call", "fifty"]
)
def test_save_killed_at_any_point_leaves_a_whole_checkpoint(
    saving: Save, tmp_path: Path, again: bool, kills: int
) -> None:
    """When the writer of a checkpoint is killed at any point, then the earlier checkpoint is
    unchanged or replaced by a whole one of the same step. The new checkpoint is whole or absent, a
    partial one is never accepted, and the next save works."""
    step = EARLIER if again else STEP
    clean, run_dir = tmp_path / "clean", tmp_path / "run"
    assert saving(clean, EARLIER, None)[0] == 0
    shutil.copytree(clean, run_dir)
    code, places = saving(run_dir, step, None)
    assert code == 0
    assert len(set(places)) >= POINTS, sorted(set(places))
    for at in chosen(places, kills):
        shutil.rmtree(run_dir)
        shutil.copytree(clean, run_dir)
        code, [place] = saving(run_dir, step, at)
        assert code == -signal.SIGKILL, place
        newest = checkpoint.newest(CheckpointStore(directory=run_dir / "checkpoints"))
        assert newest is not None, place
        assert checkpoint.verify(newest).step in (EARLIER, step), place
        if not again:
            earlier = run_dir / "checkpoints" / f"step-{EARLIER:08}"
            assert checkpoint.verify(earlier).step == EARLIER, place
    assert saving(run_dir, step, None)[0] == 0
    after = checkpoint.newest(CheckpointStore(directory=run_dir / "checkpoints"))
    assert after is not None
    assert checkpoint.verify(after).step == step
    assert not list(run_dir.glob("checkpoints/*.partial"))
