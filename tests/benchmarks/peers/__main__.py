"""
Compare tft with other systems that survive the loss of a rank: the same model and loop, three ranks,
one kill in each job. The jobs of all systems take turns. Run it by `make bench-peers`.

    python -m tests.benchmarks.peers [ROUNDS [SYSTEM ...]]

Each line of the result is one job; `python -m tests.benchmarks.peers.page` makes the page of them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.peers.measures import measured, parameters
from tests.benchmarks.peers.systems import with_nvrx, with_tft, with_torchft, with_torchrun

ROUNDS = 6
FAST = ("--heartbeat_timeout_ms", "300", "--quorum_tick_ms", "20", "--join_timeout_ms", "10000")
README = ("--heartbeat_timeout_ms", "5000", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
SYSTEMS: dict[str, Callable[[Path, str], None]] = {
    "tft": with_tft(),
    "tft, a warm rank": with_tft("--warm-ranks", "1"),
    "torchft": with_torchft(*README),
    "torchft, fast": with_torchft(*FAST),
    "NVRx in the process": with_nvrx(1000),
    "NVRx in the process, fast": with_nvrx(100),
    "torchrun": with_torchrun,
}


def main() -> None:
    """
    Print one line for each job.
    """
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    names = sys.argv[2:] or list(SYSTEMS)
    undisturbed = {name: _job(name, "live")[1] for name in names}
    for _ in range(rounds):
        for name in names:
            told, ends = _job(name, "kill")
            told["identical"] = bool(ends) and all(
                end == undisturbed[name].get(rank) for rank, end in ends.items()
            )
            print(json.dumps({"benchmark": "peers", "system": name, **told}), flush=True)


def _job(name: str, kill: str) -> tuple[dict[str, object], dict[int, bytes]]:
    """
    Run a job. Return what was measured, and the parameters with which each rank has ended.
    """
    with tempfile.TemporaryDirectory() as path:
        directory = Path(path)
        try:
            SYSTEMS[name](directory, kill)
        except subprocess.TimeoutExpired:
            return {"finished": False}, {}
        return measured(directory), parameters(directory)


if __name__ == "__main__":
    main()
