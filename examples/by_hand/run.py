"""
Do what the page says in five terminals: start broker, controller and two agents, kill some of them
and a rank, and compare the result with that of a job that was left alone.

The exit code is 0 if both jobs completed with the same losses and the same final state.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

JOB = ("--nnodes", "2", "--nproc-per-node", "2", "--adaptor", "numpy")
STEPS = "300"
"""The steps of each job: more than a slow machine makes while `tft pause` starts."""
LIMIT = 30.0
"""Seconds that anything here may take."""


class Terminals:
    """
    The processes of one job, each started as a user would start it in a terminal.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._job = ("--job", f"{run_dir.name}-{os.getpid()}", "--run-dir", str(run_dir), *JOB)
        self._broker = ""
        self._parts: dict[str, subprocess.Popen[str]] = {}

    def start(self) -> None:
        """
        Start all parts.
        """
        self.broker("0")
        self.controller()
        for node in ("0", "1"):
            self._open(
                f"agent {node}",
                "agent",
                "--node",
                node,
                *self._told(),
                "-m",
                "by_hand.train",
                STEPS,
            )

    def broker(self, port: str) -> None:
        """
        Start the broker, and read its address from its output. With port 0 the system picks a free port.
        """
        said = self._open("broker", "broker", "--port", port).stderr
        assert said is not None
        self._broker = said.readline().split()[-1]

    def controller(self) -> None:
        """
        Start the controller. A controller that replaces a killed one continues from the story of
        the run.
        """
        self._open("controller", "controller", *self._told())

    def kill(self, part: str) -> None:
        """
        Kill a part with SIGKILL.
        """
        print(f"kill -9: the {part}")
        self._parts[part].kill()
        self._parts[part].wait()

    def kill_rank(self, rank: int) -> None:
        """
        Kill the process that holds a rank with SIGKILL.
        """
        print(f"kill -9: rank {rank}")
        os.kill(int((self.run_dir / "pids" / f"rank-{rank}.pid").read_text()), signal.SIGKILL)

    def ask(self, command: str) -> None:
        """
        Run one more `tft` command for the job, in one more terminal.
        """
        words = ["tft", command, "--run-dir", str(self.run_dir)]
        print("$", *words, flush=True)
        subprocess.run(words, check=True, timeout=LIMIT)

    def restart_broker(self) -> None:
        """
        Start the broker again at its old address.
        """
        self.broker(self._broker.rpartition(":")[2])

    def steps(self, rank: int) -> int:
        """
        Return the newest step that a rank has begun.
        """
        record = self.run_dir / f"records-rank{rank}.jsonl"
        return record.read_text().count("\n") if record.exists() else 0

    def reach(self, step: int) -> None:
        """
        Wait until all ranks have begun a step.
        """
        until(lambda: all(self.steps(rank) >= step for rank in range(4)), f"step {step}")

    def codes(self) -> dict[str, int]:
        """
        Wait until the job is over. Return the exit codes of controller and agents.
        """
        waited = (part for part in self._parts if part != "broker")
        return {part: self._parts[part].wait(LIMIT) for part in waited}

    def close(self) -> None:
        """
        End all processes that still run. The broker does not end by itself.
        """
        for process in self._parts.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _told(self) -> tuple[str, ...]:
        return (*self._job, "--broker", self._broker)

    def _open(self, part: str, *words: str) -> "subprocess.Popen[str]":
        print("$ tft", *words, flush=True)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        with (self.run_dir / f"{part.replace(' ', '-')}.out").open("a") as out:
            self._parts[part] = subprocess.Popen(
                ["tft", *words], stdout=out, text=True, start_new_session=True,
                stderr=subprocess.PIPE if part == "broker" else out,
            )  # fmt: skip
        return self._parts[part]


def until(fact: Callable[[], bool], what: str) -> None:
    """
    Wait until `fact` returns True. Raises `TimeoutError`; `what` names the fact in its message.
    """
    end = time.monotonic() + LIMIT
    while not fact():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} was not reached in {LIMIT:.0f} s")
        time.sleep(0.02)


def disturb(job: Terminals) -> None:
    """
    Kill parts of the second job, and pause and resume it.
    """
    job.reach(20)
    job.kill_rank(2)
    job.reach(40)
    job.kill("controller")
    job.controller()
    job.reach(50)
    job.kill("broker")
    job.restart_broker()
    job.reach(60)
    job.ask("pause")
    job.ask("resume")


def run(run_dir: Path, during: Callable[[Terminals], None]) -> dict[str, str]:
    """
    Run a job. Return its losses and digests, by the names of the files.
    """
    job = Terminals(run_dir)
    try:
        job.start()
        during(job)
        codes = job.codes()
    finally:
        job.close()
    print(f"{run_dir}: {', '.join(f'{part} exited with {code}' for part, code in codes.items())}")
    if any(codes.values()):
        sys.exit(1)
    files = [*run_dir.glob("records-rank*.jsonl"), *run_dir.glob("final-rank*.json")]
    return {file.name: file.read_text() for file in files}


def main() -> int:
    """
    Run both jobs, and compare them.
    """
    alone, by_hand = Path("runs", "left-alone"), Path("runs", "by-hand")
    for run_dir in (alone, by_hand):
        if run_dir.exists():
            sys.exit(f"{run_dir} holds an earlier job: remove it first")
    calm = run(alone, lambda job: None)
    same = run(by_hand, disturb) == calm and len(calm) == 8
    print(f"losses and final state of 4 ranks: {'bit-identical' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
