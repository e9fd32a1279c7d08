"""
Stores, in a file of the run directory, the last step for which the callbacks of a rank were called.

A replacement process joins training after a complete step. It reads this file to find out whether
the lost process has already called its callbacks for that step, which other ranks do not know.
"""

import os
from pathlib import Path

_BYTES = 8


class Told:
    """
    The file of one rank: `transformers-rank{rank}.step`.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._file = os.open(
            run_dir / f"transformers-rank{rank}.step", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
        )

    def read(self) -> int:
        """
        Return the last step for which callbacks were called, and 0 if there is none.
        """
        return int.from_bytes(os.pread(self._file, _BYTES, 0), "little")

    def write(self, step: int) -> None:
        """
        Note that callbacks were called for `step`.
        """
        os.pwrite(self._file, step.to_bytes(_BYTES, "little"), 0)
