"""
What a `Trainer` may ask for and tft cannot do is refused with a sentence.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging, Timer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from tft_lightning.refusals import refuse_unsupported
from tft_lightning.versions import LIGHTNING
from torchmetrics import MeanMetric, MetricTracker

from tft.errors import UsageError


def trainer(**changed: Any) -> Any:
    """
    Return the settings of a trainer that is not refused, with some changes.
    """
    parts = changed.pop("parts", [])
    module = SimpleNamespace(
        automatic_optimization=changed.pop("automatic_optimization", True), modules=lambda: parts
    )
    settings: dict[str, Any] = {
        "reload_dataloaders_every_n_epochs": 0,
        "_val_check_time_interval": None,
        "callbacks": [],
    }
    return SimpleNamespace(lightning_module=module, **(settings | changed))


def strategy(**changed: Any) -> Any:
    """
    Return the settings of a strategy that is not refused, with some changes.
    """
    settings: dict[str, Any] = {
        "num_nodes": 1, "num_processes": 2, "_ddp_kwargs": {}, "_model_averaging_period": None,
        "_ddp_comm_state": None,
    }  # fmt: skip
    return SimpleNamespace(**(settings | changed))


def test_a_usual_trainer_is_not_refused() -> None:
    """When a trainer asks for nothing special, then it is not refused."""
    refuse_unsupported(trainer(), strategy(), 2)


@pytest.mark.parametrize(
    ("of_trainer", "of_strategy", "word"),
    [
        ({}, {"num_processes": 1}, "devices="),
        ({}, {"num_nodes": 2}, "num_nodes="),
        ({"automatic_optimization": False}, {}, "automatic_optimization"),
        ({"reload_dataloaders_every_n_epochs": 1}, {}, "reload_dataloaders_every_n_epochs"),
        ({"_val_check_time_interval": 60.0}, {}, "val_check_interval"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, {}, "StochasticWeightAveraging"),
        ({"callbacks": [Timer()]}, {}, "Timer"),
        ({"callbacks": [BackboneFinetuning()]}, {}, "BackboneFinetuning"),
        ({"parts": [MetricTracker(MeanMetric(), maximize=False)]}, {}, "MetricTracker"),
        ({}, {"_checkpoint_io": AsyncCheckpointIO()}, "AsyncCheckpointIO"),
        ({}, {"_ddp_kwargs": {"static_graph": True}}, "static_graph"),
        ({}, {"_model_averaging_period": 4}, "model_averaging_period"),
        ({}, {"_ddp_comm_state": object()}, "ddp_comm_state"),
    ],
)
def test_what_tft_cannot_do_is_refused_by_name(
    of_trainer: dict[str, Any], of_strategy: dict[str, Any], word: str
) -> None:
    """When a trainer or a strategy has a setting that tft cannot support, then the sentence names
    the setting."""
    with pytest.raises(UsageError, match=word):
        refuse_unsupported(trainer(**of_trainer), strategy(**of_strategy), 2)


def test_another_version_of_lightning_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another version than 2.6 is installed, then it is refused by its number."""
    LIGHTNING.check()
    monkeypatch.setattr("importlib.metadata.version", lambda _: "2.7.0")
    with pytest.raises(UsageError, match=r"2\.7\.0 is installed"):
        LIGHTNING.check()
