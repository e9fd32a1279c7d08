"""
Compare two runs of `train.py`, bit for bit.

    compare.py UNDISTURBED OTHER

The exit code is 0 if every loss of every rank and step and the digests at the end are the same.
"""

import json
import sys
from pathlib import Path


def content(run_dir: Path, pattern: str) -> dict[str, str]:
    """
    Return the files of a run that match the pattern, by their names.
    """
    return {path.name: path.read_text() for path in run_dir.glob(pattern)}


undisturbed, other = Path(sys.argv[1]), Path(sys.argv[2])
verdicts = []
for what, pattern in (("losses", "records-rank*.jsonl"), ("final state", "final-rank*.json")):
    expected = content(undisturbed, pattern)
    same = content(other, pattern) == expected != {}
    verdicts.append(same)
    print(f"{what} of {len(expected)} ranks: {'bit-identical' if same else 'DIFFERENT'}")
for incident in json.loads((other / "report.json").read_text())["incidents"]:
    faults = ", ".join(f"{fault['kind']} at rank {fault['rank']}" for fault in incident["faults"])
    seconds = incident["seconds"]["total"]
    lost = incident["steps_lost"]
    print(f"incident: {faults}; {incident['strategy']} in {seconds:.2f} s, steps lost: {lost}")
sys.exit(0 if all(verdicts) else 1)
