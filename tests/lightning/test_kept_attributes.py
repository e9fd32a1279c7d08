"""
Which attributes of the user's objects are kept, and that those of Lightning are left alone.
"""

from collections import defaultdict
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tft_lightning.kept_attributes import KeptAttributes, frameworks_own
from tft_lightning.position import CallbackState
from tft_lightning.results import noted_metrics, restore_metrics
from tft_pytorch.attributes import Attributes
from tft_pytorch.plain_values import placed
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanMetric, MeanSquaredError, MetricCollection
from torchmetrics.aggregation import RunningMean
from torchmetrics.wrappers import MinMaxMetric

from tests.lightning.sessions import Session


class Block(nn.Module):
    """
    A submodule of the user.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0


class Module(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    A module with private attributes, a submodule and a metric.
    """

    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"rate": 0.1})
        self.block = Block()
        self.mean = MeanMetric()
        self._seen: set[int] = set()
        self.shown = 0


class Data(LightningDataModule):  # type: ignore[misc]  # it has no types here
    """
    A data module that counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.served = 0


class Counting(Callback):  # type: ignore[misc]  # it has no types here
    """
    A callback whose state has a defaultdict with a function without a name.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = defaultdict(lambda: 5)
        self.parts = {"train": self.counts}

    def state_dict(self) -> dict[str, Any]:
        """
        Return the counters.
        """
        return {"counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Take the counters.
        """
        self.counts.update(state["counts"])


class Checkpoint(ModelCheckpoint):  # type: ignore[misc]  # it has no types here
    """
    A callback of the user on a callback of Lightning.
    """

    def __init__(self) -> None:
        super().__init__()
        self.things = [object()]


def attribute(what: str) -> str:
    """
    Return the name of an attribute without that of its class.
    """
    return what.split(".")[1]


def trained() -> Any:
    """
    Return what stands for a trainer.
    """
    return SimpleNamespace(lightning_module=Module(), datamodule=Data(), callbacks=[])


def test_changes_are_put_back_and_lightnings_own_are_left_alone() -> None:
    """When attributes of the module, a submodule and the data module change, then they are noted, and
    are put back at once in another process. What Lightning sets itself is not noted."""
    trainer, other = trained(), trained()
    kept, elsewhere = KeptAttributes(trainer), KeptAttributes(other)
    assert kept.noted() == {}
    module = trainer.lightning_module
    module._current_fx_name = "training_step"
    module.allow_zero_length_dataloader_with_multiple_devices = True
    module._trainer = trainer
    module.forward = print
    module.train(mode=False)
    module.mean.update(torch.ones(1))
    trainer.datamodule.trainer = None
    assert kept.noted() == {}
    module._seen.add(1)
    module.shown = 3
    module.block.calls += 1
    module.hparams["rate"] = 0.2
    trainer.datamodule.served += 2
    noted = kept.noted()
    assert {name: {*each["set"]} for name, each in noted.items()} == {
        "module": {"_seen", "_hparams"}, "module.block": {"calls"}, "data": {"served"}
    }  # fmt: skip
    kept.put_back({})
    assert (module._seen, module.block.calls, trainer.datamodule.served) == (set(), 0, 0)
    assert (module.hparams.rate, module._current_fx_name) == (0.1, "training_step")
    elsewhere.put_back({"data": noted["data"]})
    assert other.datamodule.served == 2


class Measured(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    A module with metrics that keep more than their states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.running = RunningMean(window=2)
        self.best = MinMaxMetric(MeanMetric())
        self.both = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])

    def see(self, value: float) -> list[float]:
        """Update the metrics, and return what they compute."""
        self.running.update(torch.tensor(value))
        self.best.update(torch.tensor(value))
        self.both.update(torch.tensor([value]), torch.tensor([1.0]))
        best = self.best.compute()
        self.best._base_metric.reset()
        return [
            float(each)
            for each in (self.running.compute(), best["min"], *self.both.compute().values())
        ]


def test_wrappers_and_collections_of_metrics_go_on_in_another_process() -> None:
    """When metrics keep counts and values beside their states, then a replacement goes on with
    them, and a survivor goes back to them."""
    trainer, other = (
        SimpleNamespace(lightning_module=Measured(), datamodule=None, callbacks=[]) for _ in "ab"
    )
    kept, elsewhere = KeptAttributes(trainer), KeptAttributes(other)
    assert kept.noted() == {}
    for value in (3.0, 1.0, 5.0):
        trainer.lightning_module.see(value)
    state = deepcopy((kept.noted(), noted_metrics(trainer.lightning_module)))
    expected = [trainer.lightning_module.see(value) for value in (7.0, 2.0)]
    for again, module in ((elsewhere, other), (kept, trainer)):
        noted, metrics = placed(deepcopy(state), torch.device("cpu"))
        again.put_back(noted)
        restore_metrics(module.lightning_module, metrics)
        assert [module.lightning_module.see(value) for value in (7.0, 2.0)] == expected


def test_a_metric_of_a_callback_goes_on_in_another_process() -> None:
    """When a callback has metrics as attributes, then they go on as those of the module do."""

    def measuring() -> Any:
        callback = SimpleNamespace(mean=MeanMetric(), running=RunningMean(window=2), shared=None)
        module = Module()
        callback.shared = module.mean
        return SimpleNamespace(lightning_module=module, datamodule=None, callbacks=[callback])

    def see(trainer: Any, value: float) -> list[float]:
        (callback,) = trainer.callbacks
        metrics = (callback.mean, callback.running, callback.shared)
        for each in metrics:
            each.update(torch.tensor(value))
        return [float(each.compute()) for each in metrics]

    trainer, other = measuring(), measuring()
    kept, elsewhere = KeptAttributes(trainer), KeptAttributes(other)
    for value in (3.0, 1.0, 5.0):
        see(trainer, value)
    state = deepcopy((kept.noted(), noted_metrics(trainer.lightning_module, trainer.callbacks)))
    expected = [see(trainer, value) for value in (7.0, 2.0)]
    for again, each in ((elsewhere, other), (kept, trainer)):
        noted, metrics = placed(deepcopy(state), torch.device("cpu"))
        again.put_back(noted)
        restore_metrics(each.lightning_module, metrics, each.callbacks)
        assert [see(each, value) for value in (7.0, 2.0)] == expected


def test_only_attributes_of_the_user_are_reported() -> None:
    """When objects change in a callback of the user, then its own attributes are named, and not those
    of the callback of Lightning that it stands on."""
    trainer, session = trained(), Session(attribute, audited=True)
    own, native = Checkpoint(), ModelCheckpoint()
    kept = KeptAttributes(trainer)
    callbacks = [(each, Attributes(each)) for each in (own, native)]
    kept.watch(Attributes(trainer.lightning_module, public=True), callbacks)
    assert "dirpath" in frameworks_own(own)
    kept.report(session)  # type: ignore[arg-type]
    own.things.append(object())
    trainer.lightning_module._things = object()
    for each in (own, native):
        each.kth_value = [object()]
        each.best_k_models["a"] = object()
    kept.report(session)  # type: ignore[arg-type]
    assert session.told == ["Checkpoint.things"]


def test_what_grows_too_large_is_reported_in_any_step() -> None:
    """When an attribute with an underscore grows too large behind the audited steps, then it is named
    once. An activation of this step is not."""
    trainer, session = trained(), Session(attribute, audited=False)
    kept, module = KeptAttributes(trainer), trainer.lightning_module
    module._seen.update(range(10_000))
    module.block._activation = module.block.linear(torch.ones(9000, 2))
    for _ in range(2):
        kept.noted()
        kept.report(session)  # type: ignore[arg-type]
    assert session.told == ["Module._seen"]


def test_state_of_a_callback_may_have_functions_without_a_name() -> None:
    """When the `state_dict` or an attribute of a callback has a defaultdict whose function has no name,
    then another process has the content, and its own function."""
    ours, theirs = Counting(), Counting()
    ours.counts["seen"] += 1
    CallbackState(theirs).put_back(placed(CallbackState(ours).noted(), torch.device("cpu")))
    assert theirs.counts is theirs.parts["train"]
    assert dict(theirs.counts) == {"seen": 6}
    assert theirs.counts["new"] == 5
