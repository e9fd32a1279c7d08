"""
A training with Lightning on the test device, which gathers a value of each rank at the end of an epoch
and logs their mean. Usage: `gathering.py DIR`. In epoch 0, rank 1 is killed once before it gathers.
"""

import os
import signal
from pathlib import Path
from sys import argv, path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

path += ["."]
from tests.device.group import install
from tests.once import once


class Net(LightningModule):  # type: ignore[misc]  # it has no types here
    """
    A layer whose epochs end with a collective, behind which nothing else waits for other ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Compute the loss of a batch."""
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        """Log the mean of a number that is 2 on each rank."""
        if self.global_rank == 1 and self.current_epoch == 0 and once(Path(argv[1], "died")):
            os.kill(os.getpid(), signal.SIGKILL)
        self.log("mean", self.all_gather(torch.full((2,), 2.0)).mean())

    def configure_optimizers(self) -> Any:
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main() -> None:
    """Train two epochs."""
    from tft_lightning import TftStrategy

    install()
    seed_everything(7)
    trainer = Trainer(
        accelerator="cpu", devices=2, max_epochs=2, strategy=TftStrategy(gradient_as_bucket_view=True),
        logger=CSVLogger(argv[1]), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Net(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))


if __name__ == "__main__":
    main()
