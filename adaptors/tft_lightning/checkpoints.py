"""
The checkpoints that Lightning's callbacks write during training. After an incident a checkpoint is
written again, under the same name.

`ModelCheckpoint` gives a checkpoint another name if the file exists. So the paths that were created
after a step are noted in the run directory, and count as missing when the loop goes on at the end of
that step.
"""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint


class CheckpointLedger:
    """
    Notes which checkpoints rank 0 has created after which step.
    """

    def __init__(self, run_dir: Path) -> None:
        self._place = run_dir / "lightning"
        self._repeated: set[str] = set()
        """The paths that were created after the step at which the loop goes on."""

    def creates(self, path: Path, step: int) -> None:
        """
        Note that the checkpoint `path` is about to be written after `step`.
        """
        if path.exists() and str(path) not in self._repeated:
            return
        with (self._place / f"created-{step}.jsonl").open("a") as file:
            file.write(json.dumps(str(path)) + "\n")
        self._repeated.discard(str(path))

    def goes_on(self, step: int) -> None:
        """
        Note that the loop goes on at the end of `step`.
        """
        later = [
            file
            for file in self._place.glob("created-*.jsonl")
            if int(file.stem.partition("-")[2]) >= step
        ]
        self._repeated = {
            json.loads(line) for file in later for line in file.read_text().splitlines()
        }

    def watch(self, callback: Any) -> None:
        """
        Let `callback`, a `ModelCheckpoint`, take the noted paths for missing.
        """
        if not isinstance(callback, ModelCheckpoint):
            return

        def file_exists(filepath: Any, trainer: Any) -> bool:
            there = (
                trainer.is_global_zero
                and str(Path(filepath)) not in self._repeated
                and callback._fs.exists(filepath)
            )
            found: bool = trainer.strategy.reduce_boolean_decision(there, all=False)
            return found

        callback.file_exists = file_exists
