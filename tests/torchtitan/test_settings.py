"""
Settings and versions of TorchTitan that are refused.
"""

import importlib.metadata
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import tft_torchtitan
from tft_torchtitan.settings import check_settings, warn_of_single_copies
from tft_torchtitan.versions import TORCHTITAN

from tft.errors import UsageError


@pytest.fixture(scope="module")
def config() -> Any:  # Any: TorchTitan has no types
    """
    Return settings that are accepted.
    """
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.config import TrainingConfig
    from torchtitan.trainer import Trainer

    return Trainer.Config(
        training=TrainingConfig(disable_cuda_graphs=True),
        checkpoint=CheckpointManager.Config(enable=True),
    )


def test_settings_that_were_tried_are_accepted(config: Any) -> None:
    """When nothing in the settings stands in the way of a repair, then they are accepted."""
    check_settings(config)


def _graphs(config: Any) -> None:
    config.training.disable_cuda_graphs = False


def _pipeline(config: Any) -> None:
    config.parallelism.pipeline_parallel_degree = 2


def _fake(config: Any) -> None:
    config.comm.mode = "fake_backend"


def _asynchronous(config: Any) -> None:
    config.checkpoint.async_mode = "async"


def _seed(config: Any) -> None:
    config.checkpoint.create_seed_checkpoint = True


def _two_optimizers(config: Any) -> None:
    from torchtitan.components.optimizer import ParamGroupConfig

    config.optimizer.param_groups = [
        ParamGroupConfig(pattern=pattern, optimizer_name=name)
        for pattern, name in (("norm", "Adam"), (".*", "AdamW"))
    ]


def _other_manager(config: Any) -> None:
    from torchtitan.components.checkpointer import BaseCheckpointManager

    class OtherManager(BaseCheckpointManager):  # type: ignore[misc]  # TorchTitan has no types
        @dataclass(kw_only=True, slots=True)
        class Config(BaseCheckpointManager.Config):  # type: ignore[misc]
            pass

    config.checkpoint = OtherManager.Config(enable=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_graphs, "CUDA graphs have captured"),
        (_pipeline, "pipeline parallelism was not tried"),
        (_fake, "--comm.mode fake_backend has no meaning"),
        (_asynchronous, "--checkpoint.async_mode async saves with collectives"),
        (_seed, "a seed checkpoint is made by one process"),
        (_two_optimizers, r"several optimizers \(Adam, AdamW\)"),
        (_other_manager, "checkpoints by OtherManager were not tried"),
    ],
)
def test_settings_that_could_not_be_repaired_are_refused(
    config: Any, change: Callable[[Any], None], sentence: str
) -> None:
    """When an incident could not be repaired with the settings, then they are refused with a
    sentence."""
    changed = deepcopy(config)
    change(changed)
    with pytest.raises(UsageError, match=sentence):
        check_settings(changed)


def test_a_model_without_replicas_is_warned_of(
    config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """When each part of the model is on one rank only, then a warning names the setting."""
    changed = deepcopy(config)
    changed.parallelism.data_parallel_replicate_degree = 2
    warn_of_single_copies(changed)
    assert caplog.messages == []
    changed.parallelism.data_parallel_replicate_degree = 1
    warn_of_single_copies(changed)
    (message,) = caplog.messages
    assert "--parallelism.data_parallel_replicate_degree" in message


def test_trainers_with_their_own_step_are_refused() -> None:
    """When a class overrides the step of TorchTitan's Trainer, then it is refused, because its step
    may do something else."""
    from torchtitan.trainer import Trainer

    class OwnStep(Trainer):  # type: ignore[misc]  # TorchTitan has no types
        @dataclass(kw_only=True, slots=True)
        class Config(Trainer.Config):  # type: ignore[misc]
            pass

        def train_step(self, data_iterator: Any) -> None:
            """
            Do something else.
            """

    with pytest.raises(UsageError, match="OwnStep has its own train_step"):
        check_settings(OwnStep.Config())


def test_other_objects_than_settings_are_refused() -> None:
    """When `train` is called with something else than settings, then that is refused."""
    with pytest.raises(UsageError, match=r"takes a .*Trainer\.Config, not a dict"):
        tft_torchtitan.train({})


@pytest.mark.parametrize("found", ["0.2.2", "0.4.0", "0.30.0"])
def test_other_versions_of_torchtitan_are_refused(
    found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When another version of TorchTitan is installed, then it is refused with both versions."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: found)
    with pytest.raises(
        UsageError, match=rf"from 0\.3 on and before 0\.4, but {found} is installed"
    ):
        TORCHTITAN.check()


def test_a_missing_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """When TorchTitan is not installed, then the error says how to install it."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    with pytest.raises(UsageError, match=r"pip install 'tft-bus\[torchtitan\]'"):
        TORCHTITAN.check()
