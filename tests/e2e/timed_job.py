"""
A job whose script writes down itself when each step has begun and ended, so that the time that went
into its steps can be computed without any record of tft.

    timed_job.py STEPS [--seconds SECONDS] [--wrong RANK,STEP]

With `--wrong`, a rank says once that its numbers are wrong since the last checkpoint. Each process writes `times-rank{R}-{PID}.jsonl`, and keeps a row of each step that it has computed.
"""

import argparse
import array
import json
import os
import time
from pathlib import Path

import tft
from tft.testing.adaptor import group

parser = argparse.ArgumentParser()
parser.add_argument("steps", type=int)
parser.add_argument("--seconds", type=float, default=0.02)
parser.add_argument("--wrong", default="")
args = parser.parse_args()

session = tft.init()
times = Path(session.run_dir, f"times-rank{session.rank}-{os.getpid()}.jsonl")


class Wrong(tft.TrainingFault):
    """
    A numeric error after which the numbers may be wrong on all ranks since the last update.
    """

    def __init__(self) -> None:
        super().__init__("wrong numbers", kind="numeric", polluted=True)


class Numbers:
    """
    The model of the job.
    """

    def __init__(self) -> None:
        self.values = array.array("d", [0.0] * 10)

    def state_dict(self) -> dict[str, int]:
        """
        Return the data position, which this job has not.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Do nothing.
        """


numbers = Numbers()
session.adopt(model=numbers, data=numbers)
pause = time.sleep  # a sleep replaces the computation of a step


def train(session: tft.Session) -> None:
    """
    Run the training loop.
    """
    for step in session.steps(args.steps):
        begin = time.monotonic()
        mark = Path(session.run_dir, "wrong")
        if args.wrong == f"{session.rank},{step}" and not mark.exists():
            mark.touch()
            raise Wrong
        pause(args.seconds)
        total = group().add(float(step))
        with session.update():
            for index in range(len(numbers.values)):
                numbers.values[index] += total
        row = {"step": step, "begin": begin, "end": time.monotonic()}
        with times.open("a") as file:
            file.write(json.dumps(row) + "\n")


session.run(train)
