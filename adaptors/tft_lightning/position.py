"""
The rank-local state of a Lightning training: everything of this rank except model, optimizer and
schedulers. It is the state right behind the optimizer step, from which the loop goes on.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden

from tft.errors import UsageError
from tft_lightning.attributes import NotPlain, attributes_of, plain, put_back
from tft_lightning.loaders import reader_of
from tft_lightning.logs import LogLedger
from tft_lightning.loop_state import noted_loops, restore_loops
from tft_lightning.results import (
    noted_metrics,
    noted_results,
    restart_results,
    restore_metrics,
    restore_results,
)

Trainer = Any  # Lightning's own types are not visible to mypy here

_CLOCKS = frozenset({"_last_time_checked"})
"""Attributes of callbacks that are times of day, which mean nothing in another run."""
_MODULE = frozenset(
    {"training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"}
)
_PLACE = "\0logs"
"""Stands for the directory of the logs, so that the state is the same wherever they are."""


class Position:
    """
    The object `data` of `session.adopt`: it notes and restores the rank-local state.
    """

    def __init__(self, trainer: Trainer, ledger: LogLedger) -> None:
        self._trainer = trainer
        self._ledger = ledger
        self._place = str(trainer.log_dir or "")
        self._output: dict[str, Any] = {}
        """The loss that `training_step` has returned last, and what else it has returned."""
        self._stepping = False
        """True from the first optimizer step on: the state is then the one behind a batch."""
        self.pending: dict[str, Any] | None = None
        """A state that was loaded, and that the loop has not gone back to yet."""

    def computed(self, output: Any) -> None:  # Any: what the user's training_step has returned
        """
        Note what `training_step` has returned. Tensors are detached, so that nothing of the graph
        stays. Values that are not plain are left out.
        """
        self._stepping = True
        self._output = {}
        parts = self._trainer.accumulate_grad_batches
        whole = ClosureResult.from_training_step_output(output, parts).asdict()
        for name, value in whole.items():
            with suppress(NotPlain):
                self._output[name] = plain(value)

    def state_dict(self) -> dict[str, Any]:
        """
        Return the rank-local state behind the optimizer step that is being computed.
        """
        if self.pending is not None:
            return self.pending
        trainer = self._trainer
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        state = {
            "batch": self._stepping,
            "loops": noted_loops(trainer),
            "callbacks": [_noted_callback(each) for each in trainer.callbacks],
            "module": self._noted_module(module),
            "results": noted_results(loop._results),
            "metrics": noted_metrics(module),
            "output": dict(self._output),
            "loader": reader_of(trainer.fit_loop._combined_loader.flattened[0]).state(),
            "logged": self._ledger.count,
        }
        moved: dict[str, Any] = self._moved(state, self._place, _PLACE)
        return moved

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Take over a result of `state_dict`. The loop goes back to it when it begins anew.
        """
        self.pending = dict(state)

    def go_back(self) -> dict[str, Any] | None:
        """
        Restore the state that was loaded, and return it. Return None if none was loaded.
        """
        if self.pending is None:
            return None
        state: dict[str, Any] = self._moved(self.pending, _PLACE, self._place)
        self.pending = None
        trainer = self._trainer
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        restore_loops(trainer, state["loops"])
        for callback, noted in zip(trainer.callbacks, state["callbacks"], strict=True):
            if noted is not None:
                _restore_callback(callback, noted)
        put_back(module, state["module"])
        restore_results(loop._results, state["results"], module)
        restart_results(loop.val_loop._results)
        restore_metrics(module, state["metrics"])
        reader_of(trainer.fit_loop._combined_loader.flattened[0]).load(state["loader"])
        self._ledger.count = state["logged"]
        self._stepping = state["batch"]
        return state

    def _noted_module(self, module: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value in attributes_of(module, _MODULE).items()
            if not name.startswith("_")
        }

    def _moved(self, state: Any, old: str, new: str) -> Any:
        """
        Return `state` with the directory of the logs replaced in all texts.
        """
        if not old:
            return state
        if isinstance(state, str):
            return state.replace(old, new)
        if isinstance(state, dict):
            return {self._moved(k, old, new): self._moved(v, old, new) for k, v in state.items()}
        if type(state) in (list, tuple):
            return type(state)(self._moved(each, old, new) for each in state)
        return state


def _noted_callback(callback: Any) -> dict[str, Any] | None:
    if isinstance(callback, ProgressBar):
        return None
    state = (
        callback.state_dict() if is_overridden("state_dict", callback, parent=_parent()) else None
    )
    try:
        kept = None if not state else plain(state)
    except NotPlain:
        raise UsageError(
            f"the state_dict of the callback {type(callback).__name__} has values that tft cannot "
            "keep: it keeps numbers, texts, tensors, and lists, tuples and dicts of them"
        ) from None
    return {"attributes": attributes_of(callback, _CLOCKS), "state": kept}


def _restore_callback(callback: Any, noted: Mapping[str, Any]) -> None:
    if noted["state"] is not None:
        callback.load_state_dict(dict(noted["state"]))
    put_back(callback, noted["attributes"])


def _parent() -> Callable[..., Any]:
    from lightning.pytorch.callbacks import Callback

    kind: Callable[..., Any] = Callback
    return kind
