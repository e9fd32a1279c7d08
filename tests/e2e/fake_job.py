"""
The script of the fast jobs, with a few numbers as its model and the fake adaptor instead of torch.

    fake_job.py STEPS [--bug RANK,STEP] [--spread RANK,STEP] [--device RANK,STEP]
                [--own] [--full STEP] [--keep STEPS] [--late RANK,PLACE]

With `--late`, a rank is killed after `session.run`: in the script (`script`), in what the script
has registered for its end (`exit`), or when Python takes the process down (`down`).

With `--keep STEPS`, each rank has a part that no other rank has. Every STEPS steps, the script
writes a checkpoint of its own.
"""

import argparse
import array
import atexit
import builtins
import json
import os
import random
import signal
import time
from pathlib import Path
from sys import path

import tft
from tft.testing.adaptor import group

path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from record import Record

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--bug", default="")
parser.add_argument("--spread", default="")
parser.add_argument("--device", default="")
parser.add_argument("--own", action="store_true")
parser.add_argument("--full", type=int, default=0)
parser.add_argument("--keep", type=int, default=0)
parser.add_argument("--late", default="")
parser.add_argument("--seconds", type=float, default=0.01)
args = parser.parse_args()

session = tft.init()
record = Record(session.run_dir, session.rank)


class Last:
    """
    An object that kills its process when it is deleted.
    """

    def __del__(self, kill=os.kill, pid=os.getpid(), sign=signal.SIGKILL) -> None:  # type: ignore[no-untyped-def] # noqa: B008 (the modules are gone by then)
        kill(pid, sign)


class Numbers:
    """
    The model and the data of the job. Each rank draws its own numbers, and all ranks sum them.
    """

    def __init__(self) -> None:
        self.values = array.array("d", [0.0] * 1000)
        self.position = 0
        self.lost = False
        """True when the process has lost its device, so that nothing can be read from it."""

    def draw(self) -> float:
        """
        Draw the next number of this rank.
        """
        self.position += 1
        return random.Random(1000 * session.rank + self.position).random()

    def state_dict(self) -> dict[str, int]:
        """
        Return the position. Raises `RuntimeError` if the process has lost its device.
        """
        if self.lost:
            raise RuntimeError("CUDA error: the context is destroyed")
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position to the one in `state`.
        """
        self.position = state["position"]


class Spreading(tft.TrainingFault):
    """
    A numeric error after which the numbers may be wrong on all ranks since the last update.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text, kind="numeric", polluted=True)


def once(error: Exception) -> None:
    """
    Raise `error` once per run, even if the step is computed again.
    """
    mark = Path(session.run_dir) / type(error).__name__
    if not mark.exists():
        mark.touch()
        raise error


def save(directory: Path, step: int) -> None:
    """
    Save a checkpoint with the script's own function.

    Raises `OSError` at the step `args.full`, as a full disk would.
    """
    if step == args.full:
        raise OSError("no space left on device")
    (directory / "numbers").write_bytes(numbers.values.tobytes())


def load(directory: Path) -> None:
    """
    Load the checkpoint that `save` has written in the directory.
    """
    numbers.values[:] = array.array("d", (directory / "numbers").read_bytes())


def kept(step: int, rank: int) -> Path:
    """
    Return the path of a rank's part of the script's own checkpoint of `step`. tft does not know
    this file.
    """
    return Path(session.run_dir, "kept", str(step), str(rank))


def keep(step: int) -> None:
    """
    Write this rank's part of the script's own checkpoint. The file is either complete or absent.
    """
    path = kept(step, session.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps([numbers.position, list(numbers.values)]))
    beside.replace(path)


def reload(not_after: int | None) -> int:
    """
    Load the newest checkpoint that all ranks have written and that is not later than `not_after`.
    Return its step.
    """
    there = [int(path.name) for path in Path(session.run_dir, "kept").iterdir()]
    steps = [step for step in there if not_after is None or step <= not_after]
    ranks = range(session.world)
    step = max(step for step in steps if all(kept(step, rank).exists() for rank in ranks))
    numbers.position, values = json.loads(kept(step, session.rank).read_text())
    numbers.values[:] = array.array("d", values)
    return step


numbers = Numbers()
own = args.own
session.adopt(
    model=numbers, data=numbers, save=save if own else None, load=load if own else None,
    apart=bool(args.keep), reload=reload if args.keep else None,
)  # fmt: skip
pause = time.sleep  # a sleep replaces the computation of a step


def train(session: tft.Session) -> None:
    """
    Run the training loop: one number a step.
    """
    for step in session.steps(args.steps):
        loss = numbers.draw() + numbers.values[0]
        record.write(step, loss)
        if args.bug == f"{session.rank},{step}":
            raise ValueError("a bug of the user's own")
        if args.spread == f"{session.rank},{step}":
            once(Spreading("not a number"))
        if args.device == f"{session.rank},{step}":
            numbers.lost = session.incarnation == 0
            once(RuntimeError("CUDA error: uncorrectable ECC error encountered"))
        pause(args.seconds)
        total = group().add(loss)
        with session.update():
            for index in range(len(numbers.values)):
                numbers.values[index] = total / (index + 1)
        if args.keep and not step % args.keep:
            keep(step)


session.run(train)
if args.late == f"{session.rank},script":
    os.kill(os.getpid(), signal.SIGKILL)
record.finish(session.digests())
if args.late == f"{session.rank},exit":
    atexit.register(os.kill, os.getpid(), signal.SIGKILL)
if args.late == f"{session.rank},down":
    builtins.last = Last()  # type: ignore[attr-defined]
