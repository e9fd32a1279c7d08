"""
The progress of Lightning's loops as plain values: the counters and flags of each loop, and of the
trainer and its logger connector.
"""

import json
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.loops.progress import _BaseProgress
from tft_pytorch.plain_values import plain, put_back

_FLAGS = (bool, int, float, str)
_CONNECTOR = (
    "_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_first_loop_iter", "_current_fx",
)  # fmt: skip

Trainer = Any  # Lightning's own types are not visible to mypy here


def noted_loops(trainer: Trainer) -> dict[str, Any]:
    """
    Return the progress of the loops of `trainer.fit`.
    """
    connector = trainer._logger_connector
    return {
        # packed as one JSON text, because this takes far less time than hundreds of numbers
        "fit": json.dumps(_noted(trainer.fit_loop)),
        "should_stop": trainer.should_stop,
        "accumulate": trainer.accumulate_grad_batches,
        "connector": {name: plain(getattr(connector, name)) for name in _CONNECTOR},
        "seen": dict(trainer.fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader),
    }


def restore_loops(trainer: Trainer, noted: Mapping[str, Any]) -> None:
    """
    Give the loops of `trainer.fit` the progress that `noted_loops` has returned.
    """
    _restore(trainer.fit_loop, json.loads(noted["fit"]))
    trainer.should_stop = noted["should_stop"]
    trainer.accumulate_grad_batches = noted["accumulate"]
    connector = trainer._logger_connector
    for name, value in noted["connector"].items():
        # use a copy of the noted dict, because Lightning gives the dicts in its connector to the
        # user, who may change them
        setattr(connector, name, dict(value) if isinstance(value, dict) else value)
    put_back(trainer.fit_loop.epoch_loop.val_loop, {"_seen_batches_per_dataloader": noted["seen"]})
    trainer.training = True


def _noted(loop: Any) -> dict[str, Any]:
    attributes = vars(loop)
    return {
        "flags": {name: value for name, value in attributes.items() if type(value) in _FLAGS},
        "progress": {
            name: each.state_dict()
            for name, each in attributes.items()
            if isinstance(each, _BaseProgress)
        },
        "loops": {
            name: _noted(each) for name, each in attributes.items() if isinstance(each, _Loop)
        },
    }


def _restore(loop: Any, noted: Mapping[str, Any]) -> None:
    vars(loop).update(noted["flags"])
    for name, state in noted["progress"].items():
        getattr(loop, name).load_state_dict(state)
    for name, inner in noted["loops"].items():
        _restore(getattr(loop, name), inner)
