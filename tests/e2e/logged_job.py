"""
The script of jobs that log values: the fake adaptor, and one number as the model.

    logged_job.py STEPS [--seconds SECONDS] [--polluted STEP]

Rank 0 logs a loss before the all-reduce of a step, and in every fifth step a value after the step.
All ranks log the sum, which is equal on them, after the update window. With `--polluted`, rank 1
finds once in this step that the numbers of all ranks may be wrong since the last update. From then
on, rank 0 logs another learning rate.
"""

import argparse
import array
import random
import time

import tft
from tft.testing.adaptor import group

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--seconds", type=float, default=0.01)
parser.add_argument("--polluted", type=int, default=0)
args = parser.parse_args()

session = tft.init()


class Numbers:
    """
    The model and the data of the job. Each rank draws its own numbers, and all ranks sum them.
    """

    def __init__(self) -> None:
        self.values = array.array("d", [0.0])
        self.position = 0

    def draw(self) -> float:
        """
        Draw the next number of this rank.
        """
        self.position += 1
        return random.Random(1000 * session.rank + self.position).random()

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position to the one in `state`.
        """
        self.position = state["position"]


FOUND = session.run_dir / "found"
numbers = Numbers()
session.adopt(model=numbers, data=numbers)
pause = time.sleep  # a sleep replaces the computation of a step


def train(session: tft.Session) -> None:
    """
    Run the training loop: one number a step.
    """
    for step in session.steps(args.steps):
        loss = numbers.draw() + numbers.values[0] / 7
        if session.rank == 0:
            session.log(loss=loss, lr=0.5 if FOUND.exists() else 0.25)
        if (session.rank, step) == (1, args.polluted) and not FOUND.exists():
            FOUND.touch()
            raise tft.TrainingFault("not a number", kind="numeric", polluted=True)
        pause(args.seconds)
        total = group().add(loss)
        with session.update():
            numbers.values[0] = total
        session.log({"sum/all": total})


def evaluate(step: int) -> None:
    """
    Log a value of the state after a step.
    """
    if session.rank == 0:
        session.log({"val/value": numbers.values[0]})


session.after_step(evaluate, every=5)
session.run(train)
