"""
What is noted of a Trainer before an operation, and put back when the operation is repeated.
"""

from pathlib import Path
from typing import Any

import pytest
from tft_transformers.bookkeeping import Bookkeeping
from tft_transformers.training import TrainerSurroundings

from tests.transformers.small import trainer_with


@pytest.fixture
def trainer(standing: None, tmp_path: Path) -> Any:
    """
    A Trainer with an optimizer.
    """
    trainer = trainer_with(tmp_path)
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
