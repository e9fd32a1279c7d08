"""
Trains a small classifier with Lightning on two processes, and survives the loss of processes.

    tft run --nproc-per-node 2 --adaptor lightning --run-dir runs/tft examples/lightning/train.py --dir runs/train
"""

import argparse
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tft_lightning import TftStrategy
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    Tells eight clouds of points apart.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(16, 64),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 8),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        points, kinds = batch
        loss = cross_entropy(self.net(points), kinds)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        points, kinds = batch
        scores = self.net(points)
        self.log("val_loss", cross_entropy(scores, kinds), sync_dist=True)
        self.log("val_acc", (scores.argmax(1) == kinds).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def points(count: int, seed: int) -> TensorDataset:
    """
    Return `count` points of eight clouds.
    """
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    kinds = torch.randint(8, (count,), generator=generator)
    return TensorDataset(centres[kinds] + torch.randn(count, 16, generator=generator), kinds)


def main() -> None:
    """
    Train for a few epochs.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default="runs/lightning")
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    seed_everything(7)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=TftStrategy(),
        max_epochs=args.epochs,
        log_every_n_steps=1,
        gradient_clip_val=1.0,
        default_root_dir=args.dir,
        logger=CSVLogger(args.dir),
        callbacks=[
            ModelCheckpoint(monitor="val_loss", save_top_k=2, save_last=True),
            EarlyStopping(monitor="val_loss", patience=3),
            LearningRateMonitor(logging_interval="step"),
        ],
        enable_progress_bar=False,
    )
    trainer.fit(
        Classifier(),
        DataLoader(points(512, seed=1), batch_size=16, shuffle=True),
        DataLoader(points(128, seed=2), batch_size=32),
    )


if __name__ == "__main__":
    main()
