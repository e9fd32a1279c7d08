"""
A training with Lightning as the tests need it: with `TftStrategy`, or with Lightning's own strategy
under torchrun (`--plain`). Each rank records its losses, what its callback has counted, and digests of
its final state. `--dies PLACE:RANK:NUMBER` kills a rank once, at a place that chaos does not know. With
`--device`, the ranks share one GPU.
"""

import argparse
import hashlib
import json
import os
import random
import signal
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from sys import path
from typing import Any

import numpy
import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

path += ["."]
from tests.accelerator.sharing import share_device
from tests.once import once

parser = argparse.ArgumentParser()
parser.add_argument("--dir", type=Path)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--watches", default="val_loss")
parser.add_argument("--unused", action="store_true")
parser.add_argument("--raises", type=int, default=0)
parser.add_argument("--dies", action="append", default=[])
parser.add_argument("--device", action="store_true")
parser.add_argument("--kinds", action="store_true")
parser.add_argument("--unkept", action="store_true")
parser.add_argument("--grows", action="store_true")
args = parser.parse_args()
RANK = int(os.environ["RANK"])
WHERE: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
if args.device:
    share_device()
    WHERE = {"accelerator": "gpu", "devices": 1, "num_nodes": 2}


def die(place: str, number: int) -> None:
    """
    End this process if this is where and when a rank is to be killed, and it was not killed before.
    """
    spec = f"{place}:{RANK}:{number}"
    if spec in args.dies and once(args.dir / f"died-{spec}"):
        os.kill(os.getpid(), signal.SIGKILL)


class Net(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    A small network with dropout, batch norm and several kinds of logged values.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8)
        )
        self.seen = MeanMetric()
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Compute the loss of a batch."""
        die("training", self.trainer.fit_loop.total_batch_idx)
        points, kinds = batch
        loss = cross_entropy(self.net(points + 0.01 * random.random()), kinds)
        self.seen.update(loss.detach())
        self.kept.append(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("most", loss, on_epoch=True, on_step=False, reduce_fx="max", sync_dist=True)
        return {"loss": loss, "sum": points.sum(), "large": torch.zeros(100_000)}

    def optimizer_step(self, *step: Any, **kwargs: Any) -> None:
        """Step, and raise the learning rate behind the first steps, as people do to warm up."""
        super().optimizer_step(*step, **kwargs)
        if self.trainer.global_step < 4:
            for group in self.trainer.optimizers[0].param_groups:
                group["lr"] *= 1.5

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Log the learning rate."""
        self.log("rate", optimizer.param_groups[0]["lr"])
        self.logger.log_metrics({"direct": self.global_step}, step=self.global_step)
        die("clipping", self.global_step)

    def on_train_epoch_end(self) -> None:
        """Log what was gathered in the epoch."""
        self.log("seen", self.seen)
        gathered = self.all_gather(torch.stack(self.kept))
        self.log("kept", gathered.float().mean())
        self.kept.clear()
        die("epoch_end", self.current_epoch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        if batch_idx == 1:
            sanity = self.trainer.sanity_checking
            die("sanity" if sanity else "validation", self.current_epoch)
        points, kinds = batch
        self.log("val_loss", cross_entropy(self.net(points), kinds), sync_dist=True)
        self.log("noise", torch.rand(()).to(self.device), sync_dist=True)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        """Count nothing: this is a place to be killed at."""
        die("saving", self.global_step)

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with a scheduler of steps and one that looks at a metric."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": plateau, "monitor": "val_loss"},
        ]


class Phase(Enum):
    """The phase of a training."""

    EVEN = 0
    ODD = 1


@dataclass
class Meter:
    """A sum of losses, and the last of them."""

    total: float
    last: list[float]


class Average:
    """An average as people write it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.count += 1


class Gain(nn.Module):
    """A submodule that counts its calls in attributes of several kinds, and scales by them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self._evaluations = 0, 0
        self.recent: deque[int] = deque(maxlen=3)
        self._kinds: set[int] = set()

    def forward(self, points: Tensor) -> Tensor:
        """Scale the points."""
        if self.training:
            self.calls += 1
            self.recent.append(self.calls % 5)
            self._kinds.add(self.calls % 7)
        else:
            self._evaluations += 1
        gain = sum(self.recent) + len(self._kinds) + self._evaluations % 3
        return points * (1 + 0.001 * gain)


class Kinds(Net):
    """The network, which computes with private attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(0, Gain())
        self._counted: Counter[int] = Counter()
        self._means = numpy.zeros(4)
        self._noise = numpy.random.default_rng(3)
        self._phase = Phase.EVEN
        self._meter = Meter(0.0, [])
        self.largest = numpy.float32(0)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Compute the loss of a batch, and change the attributes."""
        points, kinds = batch
        self._counted.update(kinds.tolist())
        self._phase = Phase.ODD if self._phase is Phase.EVEN else Phase.EVEN
        shift = self._means.mean() + self._noise.normal() + self._phase.value
        shift += len(self._counted) + self.largest + self._meter.total
        shift += self.trainer.datamodule._moved + len(self.trainer.datamodule.epochs)
        found = super().training_step((points + 0.001 * float(shift), kinds), batch_idx)
        loss = float(found["loss"])
        self._means *= 0.9
        self._means[batch_idx % 4] += loss
        self._meter.total += loss
        self._meter.last = [loss]
        self.largest = max(self.largest, numpy.float32(loss))
        return found


class Points(LightningDataModule):  # type: ignore[misc]  # it has no types here
    """The data, which counts the batches that it has moved."""

    def __init__(self, *loaders: Any) -> None:
        super().__init__()
        self.loaders = loaders
        self._moved = 0
        self.epochs: set[int] = set()

    def train_dataloader(self) -> Any:
        """Return the loader for training."""
        return self.loaders[0]

    def val_dataloader(self) -> Any:
        """Return the loader for validations."""
        return self.loaders[1]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Count the batch."""
        if self.trainer.training:
            self._moved += 1
            self.epochs.add(self.trainer.current_epoch)
        return batch


class Recorder(Callback):  # type: ignore[misc]  # it has no types here
    """
    Records each batch.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.epochs = 0
        self.last: deque[float] = deque(maxlen=5)
        self.numbers: set[int] = set()
        if args.unkept:
            self.average = Average()
        self.all: list[float] = []

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write a row with the loss and the batch."""
        die("batch_end", trainer.fit_loop.total_batch_idx)
        self.batches += 1
        self.last.append(float(outputs["loss"]))
        self.numbers.add(batch_idx % 6)
        if args.unkept:
            self.average.add(float(outputs["loss"]))
        if args.grows:
            self.all += [0.0] * 1000
        row = [
            trainer.fit_loop.total_batch_idx, trainer.current_epoch, batch_idx, self.batches,
            float(outputs["loss"]).hex(), float(outputs["sum"]).hex(), float(batch[0].sum()).hex(),
        ]  # fmt: skip
        with (args.dir / f"batches-rank{RANK}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        if args.raises and self.batches == args.raises:
            raise ValueError("the callback has raised")

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Count the epoch."""
        self.epochs += 1


def described(model: Net, data: Any) -> list[str]:
    """
    Return the attributes of the module, its first submodule and the data module as texts.
    """
    if not isinstance(model, Kinds):
        return []
    gain: Any = model.net[0]
    return [
        str([*map(float, model._means)]), str(sorted(model._counted.items())), str(model._meter),
        str(model._phase), repr(model.largest), str(model._noise.bit_generator.state),
        str([gain.calls, gain.recent, gain._kinds, gain._evaluations]),
        str([data._moved, data.epochs]), type(model._counted).__name__,
    ]  # fmt: skip


def digest(value: Any) -> str:
    """
    Return a digest of tensors and numbers in lists and dicts.
    """
    found = hashlib.sha256()

    def feed(each: Any) -> None:
        if isinstance(each, dict):
            for key in each:
                found.update(str(key).encode())
                feed(each[key])
        elif isinstance(each, list | tuple):
            for one in each:
                feed(one)
        else:
            found.update(
                each.cpu().numpy().tobytes() if isinstance(each, Tensor) else repr(each).encode()
            )

    feed(value)
    return found.hexdigest()


class Changing(TensorDataset):
    """
    Points that depend on a count and a generator of the dataset.
    """

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.reads = 0
        self.noise = numpy.random.default_rng(5)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """Return a point, changed a little."""
        self.reads += 1
        point, kind = (each[index] for each in self.tensors)
        return point * (1 + 0.01 * (self.reads % 7)) + 0.01 * self.noise.normal(), kind


def dataset(count: int, seed: int) -> TensorDataset:
    """
    Return points of eight clouds.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    kinds = torch.randint(8, (count,), generator=generator)
    kind = Changing if args.kinds else TensorDataset
    return kind(centres[kinds] + torch.randn(count, 16, generator=generator), kinds)


def main() -> None:
    """
    Train, and write the digests.
    """
    args.dir.mkdir(parents=True, exist_ok=True)
    seed_everything(7)
    strategy: Any = "ddp_find_unused_parameters_true" if args.unused else "ddp"
    if not args.plain:
        from tft_lightning import TftStrategy

        strategy = TftStrategy(find_unused_parameters=True) if args.unused else TftStrategy()
    recorder = Recorder()
    trainer = Trainer(
        **WHERE, strategy=strategy, max_epochs=args.epochs, log_every_n_steps=1,
        accumulate_grad_batches=args.accumulate, gradient_clip_val=1.0, val_check_interval=0.5,
        logger=CSVLogger(args.dir), enable_progress_bar=False, enable_model_summary=False,
        callbacks=[
            recorder, ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
            ModelCheckpoint(every_n_train_steps=7, save_top_k=-1, filename="step-{step}"),
            EarlyStopping(args.watches, patience=2), LearningRateMonitor("step"),
        ],
    )  # fmt: skip
    model = Kinds() if args.kinds else Net()
    loaders = (
        DataLoader(dataset(256, 1), batch_size=16, shuffle=True, num_workers=args.workers),
        DataLoader(dataset(64, 2), batch_size=16),
    )
    data = Points(*loaders) if args.kinds else None
    trainer.fit(model, *(() if data else loaders), datamodule=data)
    (args.dir / f"final-rank{RANK}.json").write_text(
        json.dumps(
            {
                "model": digest(model.state_dict()),
                "optimizer": digest(trainer.optimizers[0].state_dict()),
                "random": digest(
                    [
                        torch.get_rng_state(),
                        torch.cuda.get_rng_state() if args.device else (),
                        random.getstate(),
                        numpy.random.random(3).tolist(),
                    ]
                ),
                "counted": [recorder.batches, recorder.epochs, trainer.global_step],
                "kinds": [str(recorder.last), str(recorder.numbers), *described(model, data)],
            }
        )
    )


if __name__ == "__main__":
    main()
