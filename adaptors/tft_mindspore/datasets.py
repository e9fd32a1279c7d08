"""
Draws the batches of a MindSpore dataset one after another, over several epochs. The position in the
data can be saved and restored.
"""

from collections.abc import Iterator
from typing import Any

from mindspore.dataset import Dataset, GeneratorDataset, config

from tft.errors import UsageError

_NO_SEED = 5489
"""The seed that MindSpore reports for datasets if the script has set no seed. Each process then
shuffles a dataset in another order. A script must not set this number as its seed, because
MindSpore would treat it as no seed."""


def refuse_unseeded(dataset: Any) -> None:  # Any: MindSpore gives mypy no types
    """
    Raise `UsageError` if `dataset` shuffles its rows and the script has set no seed. Without a
    seed, a replacement process would draw the rows in another order than the process that was lost.
    """
    if config.get_seed() == _NO_SEED and _shuffles(dataset):
        raise UsageError(
            "the dataset shuffles its rows, but no seed is set, so a replacement process would "
            "draw them in another order: call mindspore.set_seed(1) before, with any number but "
            f"{_NO_SEED}, which stands for no seed, or pass shuffle=False to the dataset"
        )


def _shuffles(dataset: Any) -> bool:  # Any: MindSpore gives mypy no types
    if isinstance(dataset, GeneratorDataset) and not hasattr(dataset.source, "__getitem__"):
        # MindSpore cannot shuffle a source that is only an iterator, although `is_shuffled` returns
        # True for such a source
        return False
    if type(dataset).is_shuffled is Dataset.is_shuffled:
        return any(map(_shuffles, dataset.children))
    return bool(dataset.is_shuffled())


class Rows:
    """
    The object to pass as `session.adopt(data=...)`. Its method `next` returns one batch after
    another, over all epochs.

    After a rollback a new iterator begins at the restored position (`set_init_step`), and shuffles
    the epoch as before. This works only if the script has set the seed of the dataset
    (`mindspore.dataset.config.set_seed`, or `mindspore.set_seed`). If the dataset calls a function
    of the user, the result of this function must depend only on the row that it gets.
    """

    def __init__(self, dataset: Any, epochs: int, *, output_numpy: bool = False) -> None:
        """
        Set the position to the first batch of `dataset`. `next` reads the dataset `epochs` times.

        `dataset` is a dataset of mindspore.dataset with all its operations, such as batching. With
        `output_numpy`, batches have numpy arrays instead of Tensors. Raises `UsageError` for any
        other object, if `epochs` is less than 1, or if the dataset shuffles and no seed is set.
        """
        if not hasattr(dataset, "set_init_step") or epochs < 1:
            raise UsageError(
                f"Rows takes a dataset of mindspore.dataset and a number of epochs, not a "
                f"{type(dataset).__name__} and {epochs}"
            )
        refuse_unseeded(dataset)
        self._dataset = dataset
        self._epochs = epochs
        self._output_numpy = output_numpy
        self._position = 0
        self._rows: Iterator[Any] | None = None

    def next(self) -> tuple[Any, ...]:  # Any: Tensors or numpy arrays
        """
        Return the next batch. Raises `StopIteration` after the last batch of the last epoch.
        """
        if self._rows is None:
            self._rows = self._from_here()
        row = next(self._rows)
        self._position += 1
        return tuple(row)

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        self.load_state_dict({"position": self._position + batches})

    def state_dict(self) -> dict[str, int]:
        """
        Return the position in the data: the number of batches that were drawn or left out.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Set the position in the data to the position in `state`, which `state_dict` has returned. If
        this changes the position, the next batch comes from a new iterator.
        """
        if state["position"] != self._position:
            self._position = state["position"]
            self._rows = None

    def _from_here(self) -> Iterator[Any]:
        size = int(self._dataset.get_dataset_size())
        left = self._epochs * size - self._position
        if left <= 0:
            return
        self._dataset.set_init_step(self._position)
        epochs = self._dataset.create_tuple_iterator(
            num_epochs=self._epochs, output_numpy=self._output_numpy
        )
        while left:
            for row in epochs:  # each pass of the loop reads one epoch
                yield row
                left -= 1
