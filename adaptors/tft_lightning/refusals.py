"""
Refuses what a trainer may ask for and tft cannot do, with a sentence, before anything is changed.
"""

from typing import Any

from tft.errors import UsageError

Trainer = Any  # Lightning's own types are not visible to mypy here


def refuse_unsupported(trainer: Trainer, strategy: Any) -> None:
    """
    Raise `UsageError` if `trainer` is set up in a way that tft cannot make fault tolerant.
    """
    for wrong, sentence in (
        (
            not trainer.lightning_module.automatic_optimization,
            "the LightningModule has automatic_optimization=False, so its training_step changes the "
            "state where tft cannot see it: use automatic optimization, or write the loop by hand",
        ),
        (
            bool(trainer.reload_dataloaders_every_n_epochs),
            "reload_dataloaders_every_n_epochs makes other loaders in the middle of the training, "
            "whose position tft cannot keep: leave it out",
        ),
        (
            getattr(trainer, "_val_check_time_interval", None) is not None,
            "val_check_interval is a time, and the clocks of the ranks differ: give a number of "
            "batches",
        ),
        (
            strategy._model_averaging_period is not None or strategy._ddp_comm_state is not None,
            "model averaging and the state of a DDP communication hook differ between the ranks, and "
            "tft cannot restore them: leave out ddp_comm_state and model_averaging_period",
        ),
    ):
        if wrong:
            raise UsageError(sentence)
