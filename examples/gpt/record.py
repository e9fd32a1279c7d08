"""
The records of the example: the loss of every step, and at the end the digests of the state.

`steps-rank{r}.jsonl` has one row for each step of a rank; `final-rank{r}.json` has the digests. Two
runs went the same way if their losses and digests are the same, bit for bit.
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:  # records are also kept by scripts without torch
    from torch import nn


class Record:
    """
    The files of one rank in `directory`.

    Rows are in the order of their steps. A step may be written again, after a rollback or by a
    process that took over the rank. Then its old row and all later rows are dropped first, and also
    a row that a killed process did not finish.
    """

    def __init__(self, directory: Path | str, rank: int) -> None:
        self._final = Path(directory, f"final-rank{rank}.json")
        self._steps = Path(directory, f"steps-rank{rank}.jsonl")
        self._steps.parent.mkdir(parents=True, exist_ok=True)
        self._next: int | None = None  # unknown: another process may have written before

    def write(self, step: int, loss: float) -> None:
        """
        Add the row of `step`. When this returns, the row survives the end of the process.
        """
        if step != self._next:
            self._rewind(step)
        row = {"step": step, "loss": loss.hex(), "time": time.monotonic()}
        with self._steps.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._next = step + 1

    def finish(self, digests: Mapping[str, str]) -> None:
        """
        Write the digests of the state.
        """
        self._final.write_text(json.dumps(dict(digests), indent=2) + "\n")

    def _rewind(self, step: int) -> None:
        if not self._steps.exists():
            return
        rows = self._steps.read_bytes().splitlines(keepends=True)
        kept = sum(map(len, rows))
        # from the end, because few rows are dropped, and to read all rows would take longer with
        # each step of the run
        while rows and (not rows[-1].endswith(b"\n") or json.loads(rows[-1])["step"] >= step):
            kept -= len(rows.pop())
        os.truncate(self._steps, kept)


def digest_parameters(model: "nn.Module") -> str:
    """
    Return the digest (XXH3-128, hexadecimal) of all parameters, in their order.
    """
    digest = xxhash.xxh3_128()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().data)
    return digest.hexdigest()
