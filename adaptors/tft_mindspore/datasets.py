"""
Batches of a dataset of MindSpore's, one after another over its epochs, with a position that can be kept.
"""

from collections.abc import Iterator
from typing import Any

from tft.errors import UsageError


class Rows:
    """
    For `session.adopt(data=...)`: `next()` is the next batch, whatever epoch it is of.

    Going back makes a new iterator that begins at the position (`set_init_step`), with the shuffling that
    the epoch had. That holds where the dataset's own seed is set (`mindspore.dataset.config.set_seed`, or
    `mindspore.set_seed`), and where what a function of the user's returns depends on nothing but its row.
    """

    def __init__(self, dataset: Any, epochs: int, *, output_numpy: bool = False) -> None:
        """
        `dataset` is one of mindspore.dataset, batched and all.
        """
        if not hasattr(dataset, "set_init_step") or epochs < 1:
            raise UsageError(
                f"Rows takes a dataset of mindspore.dataset and a number of epochs, not a "
                f"{type(dataset).__name__} and {epochs}"
            )
        self._dataset = dataset
        self._epochs = epochs
        self._output_numpy = output_numpy
        self._position = 0
        self._rows: Iterator[Any] | None = None

    def next(self) -> tuple[Any, ...]:  # Any: Tensors, or arrays of numpy
        """
        The next batch. Raises `StopIteration` after the last one of the last epoch.
        """
        if self._rows is None:
            self._rows = self._from_here()
        row = next(self._rows)
        self._position += 1
        return tuple(row)

    def skip(self, batches: int) -> None:
        """
        Leave out the next batches.
        """
        self.load_state_dict({"position": self._position + batches})

    def state_dict(self) -> dict[str, int]:
        """
        How many batches were drawn.
        """
        return {"position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Go on as if so many batches had been drawn.
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
            for row in epochs:  # one epoch, then the next one
                yield row
                left -= 1
