"""
What the adaptor for Transformers refuses, and when.
"""

from pathlib import Path
from typing import Any

import pytest
import tft_transformers
import torch
import torch.distributed as dist
from tft_transformers import joining, versions
from tft_transformers.refusals import check
from transformers import TrainingArguments
from transformers.optimization import GreedyLR

from tests.transformers.small import trainer_with
from tft.errors import UsageError


def test_the_stand_in_refuses_to_communicate(standing: None, tmp_path: Path) -> None:
    """When TrainingArguments are made over the stand-in, then they know rank and number of ranks,
    and whatever needs another rank raises."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert (args.process_index, args.world_size) == (1, 2)
    with pytest.raises(UsageError, match="main_process_first"):
        dist.barrier()
    for collective in (dist.all_gather_into_tensor, dist.reduce_scatter_tensor):
        with pytest.raises(UsageError, match="the ranks cannot communicate"):
            collective(torch.zeros(2), torch.zeros(2))
    with pytest.raises(UsageError, match="the ranks cannot communicate"), args.main_process_first():
        pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics"),
        ({"ignore_data_skip": True}, "ignore_data_skip"),
        ({"lr_scheduler_type": "greedy", "eval_strategy": "steps"}, "greedy"),
        ({"optim": "schedule_free_adamw"}, "schedule_free"),
        ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches"),
        ({"accelerator_config": {"use_seedable_sampler": False}}, "use_seedable_sampler"),
    ],
)
def test_settings_are_refused(
    standing: None, tmp_path: Path, arguments: dict[str, Any], reason: str
) -> None:
    """When a setting does not fit, then a sentence names it."""
    check(trainer_with(tmp_path), 2)
    with pytest.raises(UsageError, match=reason):
        check(trainer_with(tmp_path, **arguments), 2)


class Switching(torch.optim.SGD):
    """
    An optimizer without a schedule: it has other parameters in evaluations.
    """

    def train(self) -> None:
        """
        Use the parameters of training.
        """

    def eval(self) -> None:
        """
        Use the parameters of evaluations.
        """


def test_objects_are_refused(standing: None, tmp_path: Path) -> None:
    """When an optimizer or a scheduler that does not fit is given as an object or a class, then a
    sentence names its type."""
    trainer = trainer_with(tmp_path)
    trainer.optimizer = Switching(trainer.model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="Switching has the methods train and eval"):
        check(trainer, 2)
    trainer.lr_scheduler = GreedyLR(trainer.optimizer)
    with pytest.raises(UsageError, match="GreedyLR"):
        check(trainer, 2)
    trainer = trainer_with(tmp_path)
    trainer.optimizer_cls_and_kwargs = (Switching, {"lr": 0.1})
    with pytest.raises(UsageError, match="Switching"):
        check(trainer, 2)


def test_a_trainer_that_sees_too_few_ranks_is_refused(standing: None, tmp_path: Path) -> None:
    """When TrainingArguments do not see all ranks, then a sentence says what to do."""
    with pytest.raises(UsageError, match="use_cpu=True"):
        check(trainer_with(tmp_path), 4)
    with pytest.raises(UsageError, match="not a dict"):
        check({}, 2)


def test_prepare_without_init_is_refused(tmp_path: Path) -> None:
    """When `prepare` is called without `init`, then a sentence says so."""
    with pytest.raises(UsageError, match="init"):
        tft_transformers.prepare(object())


def test_a_second_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a second Trainer is prepared in a job, then a sentence says so before any training."""
    monkeypatch.setattr(joining, "_joined", [object()])
    monkeypatch.setattr(joining, "_prepared", [object()])
    with pytest.raises(UsageError, match="a second time: a job trains with one Trainer"):
        tft_transformers.prepare(object())


def test_a_limit_of_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the limit of evaluations is not above 0, then a sentence says so."""
    monkeypatch.setattr(joining, "_joined", [object()])
    with pytest.raises(UsageError, match="limit must be a number of seconds above 0"):
        tft_transformers.prepare(object(), limit=0.0)


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another version of Transformers is installed, then a sentence names both versions."""
    versions.check_versions()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "4.57.0")
    with pytest.raises(
        UsageError, match=r"for transformers from 5\.4 on and before 6, but 4\.57\.0"
    ):
        versions.check_versions()
