"""
The checkpoints that Lightning's callbacks write during training. When steps are trained again after
an incident, their checkpoints are written again, and must get the same names as before.

`ModelCheckpoint` gives a checkpoint another name if the file exists. So the run directory has a
note of which paths were created after which step. When the loop continues at the end of a step, the
paths that were created after this step count as missing.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint


class CheckpointLedger:
    """
    Notes which checkpoints rank 0 has created after which step.
    """

    def __init__(self, run_dir: Path) -> None:
        self._place = run_dir / "lightning"
        self._repeated: set[str] = set()
        """The checkpoints that were created after the step from which the loop continues. The loop
        will create them again."""

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
        Note that the loop continues at the end of `step`, so that it will create again all
        checkpoints that were created after this step.
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
        Make `callback` treat the checkpoints that will be created again as missing files. Do
        nothing if `callback` is not a `ModelCheckpoint`.
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


class _Written(Exception):
    """
    Raised to leave the loops of the trainer when the checkpoint is written.
    """


class Writer(Callback):  # type: ignore[misc]  # it has no types here
    """
    Writes one checkpoint at the end of a batch, at the time at which `ModelCheckpoint` does, and
    leaves the loops.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def among(self, callbacks: list[Callback]) -> Iterator[None]:
        """
        Add this callback to `callbacks` for the `with` block, before callbacks that write
        checkpoints. When this callback has written the checkpoint, it leaves the block with an
        exception.
        """
        kinds = [isinstance(each, Checkpoint) for each in callbacks]
        callbacks.insert(kinds.index(True) if True in kinds else len(callbacks), self)
        try:
            with suppress(_Written):
                yield
        finally:
            callbacks.remove(self)

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        """
        Write the checkpoint.
        """
        self.write(trainer)

    def write(self, trainer: Any) -> None:
        """
        Write the checkpoint, and leave the block of `among`.
        """
        trainer.save_checkpoint(self._path)
        raise _Written
