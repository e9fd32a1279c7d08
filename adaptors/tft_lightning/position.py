"""
The rank-local state of a Lightning training: everything of this rank except model, optimizer and
schedulers. It is the state right after the optimizer step, from which the loop continues.
"""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.apply_func import apply_to_collection
from lightning.pytorch.callbacks import (
    Callback,
    LearningRateMonitor,
    ProgressBar,
    ThroughputMonitor,
)
from lightning.pytorch.loops.optimization.automatic import ClosureResult
from lightning.pytorch.utilities.model_helpers import is_overridden
from tft_pytorch.attributes import Attributes
from tft_pytorch.plain_values import placed, plain
from torch import Tensor

from tft import Session
from tft.errors import UsageError
from tft.spi.plain_values import Filled, NotPlain
from tft_lightning.evaluations import Evaluations
from tft_lightning.kept_attributes import KeptAttributes
from tft_lightning.loaders import Reader, reader_of
from tft_lightning.loop_state import noted_loops, restore_loops
from tft_lightning.outputs import partly_kept
from tft_lightning.owners import Watched
from tft_lightning.results import (
    noted_metrics,
    noted_results,
    restart_results,
    restore_metrics,
    restore_results,
)

Trainer = Any  # Lightning's own types are not visible to mypy here

_CLOCKS = frozenset({"_last_time_checked", "_t0s"})
"""Attributes of callbacks that are not kept, because they are readings of a clock of this machine.
They mean nothing on another machine, or after a reboot."""
_MODULE = frozenset(
    {"training", "prepare_data_per_node", "allow_zero_length_dataloader_with_multiple_devices"}
)
_PLACE = "\0logs"
"""Stands for the directory of the logs in the texts of the state, so that the state is valid also
if the logs are in another directory later."""


class Position:
    """
    The object that `session.adopt` gets as `data`: it notes and restores the rank-local state of a
    Lightning training.
    """

    tft_position_of_loop = True
    """See `tft.spi.is_position_of_loop`."""

    def __init__(self, trainer: Trainer, kept: KeptAttributes, watched: Watched) -> None:
        self._trainer = trainer
        self._place = str(trainer.log_dir or "")
        self._module = Attributes(trainer.lightning_module, _MODULE, public=True)
        self._callbacks = [
            CallbackState(each) for each in trainer.callbacks if not isinstance(each, ProgressBar)
        ]
        self._evaluations = Evaluations(trainer.fit_loop.epoch_loop.val_loop)
        self._kept = kept
        kept.watch(
            self._module,
            [(each.callback, each.attributes) for each in self._callbacks],
            watched.all(),
        )
        self._watched = watched
        self.output: Any = {}
        """The last result of `training_step`, in the form that callbacks get."""
        self._output: dict[str, Any] = {}
        """Those values of `output` that are kept in the rank-local state, for a replacement
        process."""
        self._left_out: list[Any] = []
        """The names of the values of `output` that are not kept, because they are large or of a
        type that cannot be packed."""
        self._stepping = False
        """True after the first optimizer step. Then the state belongs to the moment after a batch,
        not to the beginning of training."""
        self.pending: dict[str, Any] | None = None
        """A received state that `go_back` has not restored yet."""
        self._gone_back: dict[str, Any] = {}
        """The state that `go_back` has restored last."""

    def computed(self, output: Any) -> None:  # Any: what the user's training_step has returned
        """
        Note what `training_step` has returned. The tensors are detached, so that they do not keep
        the autograd graph in memory. Values that are large or not plain are left out of the
        rank-local state.
        """
        self._stepping = True
        parts = self._trainer.accumulate_grad_batches
        whole = ClosureResult.from_training_step_output(output, parts).asdict()
        self.output = apply_to_collection(whole, Tensor, Tensor.detach)
        self._output, self._left_out = partly_kept(self.output)

    def state_dict(self) -> dict[str, Any]:
        """
        Return the rank-local state after the optimizer step that is being computed.
        """
        if self.pending is not None:
            return self.pending
        trainer = self._trainer
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        state = {
            "batch": self._stepping,
            "loops": noted_loops(trainer),
            "callbacks": _moved([each.noted() for each in self._callbacks], self._place, _PLACE),
            "module": self._module.noted(),
            "changed": self._kept.noted(),
            "results": noted_results(loop._results),
            "metrics": noted_metrics(module, trainer.callbacks),
            "output": dict(self._output),
            "left_out": self._left_out,
            "loader": self._reader.state(loop.batch_idx),
            "evaluations": self._evaluations.noted(),
        }
        return state

    @property
    def _reader(self) -> Reader:
        return reader_of(self._trainer.fit_loop._combined_loader.flattened[0])

    def epoch_begins(self) -> None:
        """
        Note that an epoch begins. Hooks may then change the datasets of the validations, so the
        states of the validation loaders are read again when they are needed next.
        """
        self._evaluations.renew()

    def report(self, session: Session) -> None:
        """
        Report to the session the attributes of the user's objects that change and are not kept.
        """
        self._kept.report(session)
        self._watched.report(session)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Store a result of `state_dict`. `go_back` restores it when the loop starts again.
        """
        self.pending = dict(state)

    def go_back(self) -> dict[str, Any] | None:
        """
        Restore the state that was loaded, and return it. Return None if none was loaded.
        """
        if self.pending is None:
            return None
        trainer = self._trainer
        module, loop = trainer.lightning_module, trainer.fit_loop.epoch_loop
        state: dict[str, Any] = placed(self.pending, module.device)
        self._gone_back, self.pending = self.pending, None
        restore_loops(trainer, state["loops"])
        callbacks = _moved(state["callbacks"], _PLACE, self._place)
        filled: Filled = {}
        for callback, noted in zip(self._callbacks, callbacks, strict=True):
            callback.put_back(noted, filled)
        self._put_attributes_back(state, filled)
        restore_results(loop._results, state["results"], module)
        restart_results(loop.val_loop._results)
        restore_metrics(module, state["metrics"], trainer.callbacks)
        # Give these loaders the state as it was received, without `placed`: they call `placed` when
        # they put the values into the user's objects later.
        self._reader.load(self._gone_back["loader"])
        # a checkpoint of an earlier version of tft has no entry `evaluations`
        if "evaluations" in self._gone_back:
            self._evaluations.restore(self._gone_back["evaluations"])
        self._stepping = state["batch"]
        return state

    def batch_read_again(self) -> None:
        """
        Restore the attributes of module and data module once more. The last batch was read again
        since they were restored, and the hooks that were called for the batch may have changed
        them.
        """
        noted = {name: self._gone_back[name] for name in ("module", "changed")}
        self._put_attributes_back(placed(noted, self._trainer.lightning_module.device), {})

    def _put_attributes_back(self, state: Mapping[str, Any], filled: Filled) -> None:
        self._module.put_back(state["module"], filled)
        self._kept.put_back(state["changed"], filled)


# Any: a tree of plain values
def _moved(state: Any, old: str, new: str) -> Any:
    """
    Return `state` with the directory `old` replaced by `new` in all texts.
    """
    kind = type(state)
    if kind is str:
        return state.replace(old, new) if old else state
    if kind is dict:
        return {_moved(key, old, new): _moved(each, old, new) for key, each in state.items()}
    if kind is list or kind is tuple:
        return kind(_moved(each, old, new) for each in state)
    return state


class CallbackState:
    """
    The state of a callback: its `state_dict` if it has one, and its attributes with plain values
    (numbers, texts, tensors, arrays, and containers of them).
    """

    def __init__(self, callback: Any) -> None:
        self.callback = callback
        # a LearningRateMonitor collects all learning rates that it has logged in `lrs`, but never
        # reads them, so this growing list need not be kept
        grows = {"lrs"} if isinstance(callback, LearningRateMonitor) else set()
        self.attributes = Attributes(callback, _CLOCKS | grows)
        self._tells = is_overridden("state_dict", callback, parent=Callback)

    def noted(self) -> dict[str, Any]:
        """
        Return a copy of the state. Raises `UsageError` if it cannot be kept.
        """
        state = {"attributes": self.attributes.noted(), "state": None}
        if self._tells:
            try:
                state["state"] = plain(self.callback.state_dict())
            except NotPlain:
                raise UsageError(
                    f"the state_dict of the callback {type(self.callback).__name__} has values "
                    "that tft cannot keep: it keeps numbers, texts, tensors, arrays, and lists, "
                    "sets and dicts of them"
                ) from None
        return state

    def put_back(self, noted: Mapping[str, Any], filled: Filled | None = None) -> None:
        """
        Restore the callback to `noted`, a result of the method `noted`. Pass the same dict `filled`
        for all callbacks (see `Attributes.put_back`).
        """
        if noted["state"]:
            self.callback.load_state_dict(dict(noted["state"]))
        self.attributes.put_back(noted["attributes"], filled)
        if isinstance(self.callback, ThroughputMonitor):
            # a ThroughputMonitor refuses counts of batches and samples that do not grow. After an
            # incident the counts are smaller, so make it begin anew.
            for each in self.callback._throughputs.values():
                each.reset()
