"""
The demo: train the small GPT twice, once undisturbed and once with two ranks killed, rank 0 among
them. Then compare every loss of every rank and the final state, bit for bit, and write the report of
the second run. With --megatron the GPT is megatron-core's.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

ROOT = Path(__file__).parents[2]
TRAIN = (str(ROOT / "examples" / "gpt" / "train.py"),)
MEGATRON = (
    "--adaptor", "megatron", str(ROOT / "examples" / "megatron_gpt" / "train.py"),
    # megatron-core asks for CUDA even where it could do without; the shim of the tests replaces it
    "--without-cuda", str(ROOT / "tests" / "megatron" / "shim.py"),
)  # fmt: skip
SPEC = "kill:rank=2,step={0},phase=update", "kill:rank=0,step={1},phase=backward"
PHASES = ("detect", "freeze", "clear", "await", "rebuild", "repair", "rollback", "resume", "total")


class Tail:
    """
    Reads the lines that are added to a file of JSON lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def news(self) -> Iterator[dict[str, Any]]:  # Any: JSON
        """
        Yield the complete lines that were added since the last call.
        """
        if not self._path.exists():
            return
        content = self._path.read_bytes()
        whole = content[self._read : content.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            yield json.loads(line)


def last_row(path: Path) -> dict[str, Any] | None:  # Any: JSON
    """
    Return the last complete line of a rank's record; None if there is none.

    A record is shortened when its rank is rolled back, so it is read again each time.
    """
    if not path.exists():
        return None
    *lines, _ = path.read_bytes().split(b"\n")
    return json.loads(lines[-1]) if lines else None


class Progress:
    """
    The state of the ranks of a run, read from its records while they are written.
    """

    def __init__(self, run_dir: Path, ranks: int) -> None:
        self._story = Tail(run_dir / "story.jsonl")
        self._records = [run_dir / f"steps-rank{r}.jsonl" for r in range(ranks)]
        self.step = [0] * ranks
        self.loss = [float("nan")] * ranks
        self.state = ["starting"] * ranks
        self.process = [0] * ranks

    def update(self) -> None:
        """
        Read the new records.
        """
        for rank, record in enumerate(self._records):
            if (row := last_row(record)) is not None:
                self.step[rank], self.loss[rank] = row["step"], float.fromhex(row["loss"])
        for line in self._story.news():
            self._tell(line["kind"], line["body"])

    def _tell(self, kind: str, body: dict[str, Any]) -> None:  # Any: JSON
        rank = body.get("rank")
        states = {"Joined": "joined", "Ready": "waiting", "Exited": "[red]lost[/red]",
                  "Finished": "finished", "Faulted": "[red]fault[/red]"}  # fmt: skip
        if rank is None:
            return
        if kind == "Spawned":
            self.process[rank] = body["pid"]
            self.state[rank] = "[yellow]starting[/yellow]" if body["incarnation"] else "starting"
        elif kind == "Answered":
            resumed = body["order"] == "resume"
            self.state[rank] = "[green]training[/green]" if resumed else body["order"]
        elif kind == "Exited" and body["code"] == 0:
            self.state[rank] = "done"
        elif kind in states:
            self.state[rank] = states[kind]

    def table(self, title: str) -> Table:
        """
        Return a table with one row for each rank.
        """
        table = Table(title=title)
        for name in ("rank", "process", "step", "loss", "state"):
            table.add_column(name, justify="left" if name == "state" else "right", min_width=8)
        for rank, step in enumerate(self.step):
            loss, pid = f"{self.loss[rank]:.4f}", str(self.process[rank])
            table.add_row(str(rank), pid, str(step), loss, self.state[rank])
        return table


def train(
    title: str, run_dir: Path, script: Sequence[str], steps: int, ranks: int, chaos: list[str]
) -> int:
    """
    Do one run, show it live, and return its exit code.
    """
    struck = [word for spec in chaos for word in ("--chaos", spec)]
    command = [
        sys.executable, "-m", "tft", "run", "--nproc-per-node", str(ranks),
        "--run-dir", str(run_dir), *struck, *script, "--steps", str(steps),
    ]  # fmt: skip
    progress = Progress(run_dir, ranks)
    output = run_dir.with_suffix(".out")
    with output.open("w") as out, Live(progress.table(title), refresh_per_second=12) as live:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        running = True
        while running:
            try:
                process.wait(timeout=0.08)
                running = False
            except subprocess.TimeoutExpired:
                pass  # still training: show the progress
            progress.update()
            live.update(progress.table(title))
    if process.returncode:
        print(output.read_text(), file=sys.stderr)
    return process.returncode


def same(run_dir: Path, other: Path, pattern: str, *, drop: str = "") -> bool:
    """
    Return True if the matching files of both runs say the same, apart from one key of their rows.
    """

    def told(directory: Path) -> dict[str, list[dict[str, Any]]]:  # Any: JSON
        files = sorted(directory.glob(pattern))
        rows = {f.name: f.read_text() for f in files}
        return {
            name: [
                {k: v for k, v in json.loads(line).items() if k != drop}
                for line in (text.splitlines() if drop else [text])
            ]
            for name, text in rows.items()
        }

    return told(run_dir) == told(other) != {}


def summary(report: dict[str, Any], losses: bool, state: bool) -> Table:  # Any: JSON
    """
    Return a table with each incident and the verdict.
    """
    table = Table(title="what happened (seconds; phases overlap)")
    for name in ("incident", "fault", "strategy", "step", "lost", *PHASES):
        table.add_column(name, justify="right")
    for incident in report["incidents"]:
        seconds = incident["seconds"]
        faults = ", ".join(f"{f['kind']}, rank {f['rank']}" for f in incident["faults"])
        cells = ["-" if seconds[p] is None else f"{seconds[p]:.3f}" for p in PHASES]
        table.add_row(
            str(incident["id"]), faults, incident["strategy"], str(incident["step"]),
            str(incident["steps_lost"]), *cells,
        )  # fmt: skip
    verdict = "bit-identical" if losses and state else "[red]DIFFERENT[/red]"
    table.caption = (
        f"losses of all ranks and steps: {'the same' if losses else 'different'}; "
        f"final digests: {'the same' if state else 'different'}: {verdict}"
    )
    return table


def main() -> int:
    """
    Do both runs and compare them.

    Returns the exit code of a run that failed, or 0 if both runs are the same and there was one
    incident for each fault, or 1.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--megatron", action="store_true")
    args = parser.parse_args()
    runs = Path(tempfile.mkdtemp(prefix="tft-demo-"))
    chaos = [spec.format(args.steps // 3, 2 * args.steps // 3) for spec in SPEC]
    script = MEGATRON if args.megatron else TRAIN
    calm, struck = runs / "undisturbed", runs / "struck"
    for title, run_dir, specs in (
        ("undisturbed", calm, []),
        (f"with {', '.join(chaos)}", struck, chaos),
    ):
        code = train(title, run_dir, script, args.steps, args.ranks, specs)
        if code:
            return code
    losses = same(calm, struck, "steps-rank*.jsonl", drop="time")
    state = same(calm, struck, "final-rank*.json")
    report = json.loads((struck / "report.json").read_text())
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(summary(report, losses, state))
    console.print(f"the records of both runs: {runs}")
    subprocess.run([sys.executable, "-m", "tft", "report", str(struck)], check=True)
    return 0 if losses and state and len(report["incidents"]) == len(chaos) else 1


if __name__ == "__main__":
    sys.exit(main())
