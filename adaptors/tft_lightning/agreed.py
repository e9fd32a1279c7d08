"""
Values on which all ranks agree before there are process groups, such as the directory of the logs.

Lightning broadcasts such values from rank 0 while it sets up. Here, rank 0 writes each value to the
run directory, in the order of the broadcasts, and the other ranks read it. A process that replaces a
lost rank, also rank 0, reads the values that its predecessor had. So it waits for nobody.
"""

import os
import pickle
import time
from pathlib import Path
from typing import Any

_WAIT = 0.01
"""Seconds between two looks for a value that rank 0 has not written yet."""


class Agreed:
    """
    The values in the run directory `run_dir`, for the rank `rank`.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._place = run_dir / "lightning" / "agreed"
        self._rank = rank
        self._next = 0

    def value(self, own: Any) -> Any:  # Any: the value may have any type
        """
        Return the next value: `own` of rank 0 when the job was started.
        """
        path = self._place / f"{self._next}.pickle"
        self._next += 1
        if self._rank == 0 and not path.exists():
            self._place.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps(own))
            draft.replace(path)
        while not path.exists():
            time.sleep(_WAIT)
        return pickle.loads(path.read_bytes())  # noqa: S301 (the job's own run directory)
