"""
The objects that exist once in each process: the process groups, and the callback for `Model.train`.
The adaptor's hooks and the callback both use these objects.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tft_mindspore.groups import Groups
    from tft_mindspore.kept_attributes import KeptAttributes


class ModelTrain(Protocol):
    """
    The methods of the callback `TrainFaultTolerance` that the hooks call.
    """

    strategies: tuple[str, ...]
    """The strategies that the environment enables, by tft's names, such as `recover`."""
    kept: "KeptAttributes | None"
    """The object that saves and restores the attributes of the script's other callbacks. None
    before training begins."""

    def save(self, directory: Path, shard: str, step: int) -> Sequence[str]:
        """
        Let MindSpore save the state to its own checkpoint, in the directory that the script has
        chosen. Return the names of the files that this method itself has written under `directory`.
        """

    def rename(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        """
        Let MindSpore give its checkpoint the final name, when all ranks have saved. `files` are the
        names that `save` has returned on the ranks. Return the names of files that this method
        itself has written under `directory`.
        """

    def has_saved(self, directory: Path, shard: str) -> bool:
        """
        Return True if MindSpore itself has saved the state of the checkpoint `directory`, and not
        tft. The script itself then loads this state.
        """


_model_train: ModelTrain | None = None


def trained_by_model(callback: ModelTrain) -> None:
    """
    Set the callback that `model_train` returns. The callback calls this function itself, in a
    script that trains with `Model.train`.
    """
    global _model_train
    _model_train = callback


def model_train() -> ModelTrain | None:
    """
    Return the callback of a script that trains with `Model.train`. Return None if the script has
    its own training loop.
    """
    return _model_train


@cache
def groups() -> "Groups":
    """
    Return the one object of this process that forms the process groups.
    """
    from tft_mindspore.groups import Groups

    return Groups()
