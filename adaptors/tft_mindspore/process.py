"""
The objects of which each process has only one: the process groups, and the callback for
`Model.train`. The adaptor's hooks and the callback share them.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from tft_mindspore.groups import Groups


class ModelTrain(Protocol):
    """
    The methods of the callback `TrainFaultTolerance` that the hooks call.
    """

    strategies: tuple[str, ...]
    """The strategies that the environment enables, by tft's names."""

    def save(self, directory: Path, shard: str, step: int) -> Sequence[str]:
        """
        Let MindSpore save the state to its own checkpoint. Return the names of the files under
        `directory`.
        """

    def rename(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        """
        Let MindSpore give its checkpoint the final name.
        """

    def has_saved(self, directory: Path, shard: str) -> bool:
        """
        Return whether MindSpore has saved the checkpoint under `directory`.
        """


_model_train: ModelTrain | None = None


def trained_by_model(callback: ModelTrain) -> None:
    """
    Set the callback of a script that trains with `Model.train`.
    """
    global _model_train
    _model_train = callback


def model_train() -> ModelTrain | None:
    """
    Return the callback of a script that trains with `Model.train`. Return None if the script has
    its own training loop. The callback knows which strategies are enabled, and writes last
    checkpoints.
    """
    return _model_train


@cache
def groups() -> "Groups":
    """
    Return the object that forms the process groups.
    """
    from tft_mindspore.groups import Groups

    return Groups()
