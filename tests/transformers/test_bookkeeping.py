"""
What is noted of a Trainer before an operation, and put back when the operation is repeated.
"""

from pathlib import Path
from typing import Any

import pytest
from tft_transformers.bookkeeping import Bookkeeping
from tft_transformers.training import TrainerSurroundings
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from tests.transformers.small import trainer_with


class Seen(TrainerCallback, ExportableState):  # type: ignore[misc]  # Transformers ships no types
    """
    A callback whose state is a list, which it gives away itself.
    """

    def __init__(self) -> None:
        self.seen: list[int] = []

    def state(self) -> dict[str, Any]:
        """
        Return the state of the callback.
        """
        return {"args": {}, "attributes": {"seen": self.seen}}


@pytest.fixture
def trainer(standing: None, tmp_path: Path) -> Any:
    """
    A Trainer with an optimizer and a callback with a state.
    """
    trainer = trainer_with(tmp_path)
    trainer.add_callback(Seen)
    trainer.create_optimizer()
    return trainer


def test_whether_gradients_are_reduced_is_put_back(trainer: Any) -> None:
    """When a micro-batch is repeated after the Trainer went on to the next one, then
    `accelerator.sync_gradients` is what it was."""
    surroundings = TrainerSurroundings(trainer, Bookkeeping(trainer, 1, 2))
    trainer.accelerator.gradient_state._set_sync_gradients(False)
    noted = surroundings.noted()
    trainer.accelerator.gradient_state._set_sync_gradients(True)
    surroundings.put_back(noted)
    assert trainer.accelerator.sync_gradients is False


def test_the_state_of_a_callback_is_put_back_as_often_as_needed(trainer: Any) -> None:
    """When a callback changes the list that is its state in place, then what was noted stays as it
    was, also after it was put back."""
    book = Bookkeeping(trainer, 1, 2)
    (callback,) = [each for each in book.stateful() if isinstance(each, Seen)]
    noted = book.noted()
    book.end_step()
    for _ in range(2):
        callback.seen.append(3)
        book.put_back(noted)
        assert callback.seen == []
    callback.seen.append(3)
    book.settle()
    assert callback.seen == []
