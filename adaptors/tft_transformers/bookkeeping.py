"""
The Trainer's bookkeeping: its `TrainerState` and `TrainerControl`, the state of its callbacks, and
its totals of losses and floating-point operations.

tft gets the bookkeeping as one of the `others` of `session.adopt`. Such state must be equal on all
ranks, and must not change before the next update window. But the Trainer changes its bookkeeping
earlier. So this module notes the bookkeeping at the end of each step, and gives tft the noted one.
"""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer_callback import ExportableState, TrainerState

_OWN = ("is_local_process_zero", "is_world_process_zero", "log_history", "stateful_callbacks")
"""The fields of a `TrainerState` that differ between ranks, or that this module stores
separately."""

_SHARED = tuple(field.name for field in fields(TrainerState) if field.name not in _OWN)
_TOTALS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step",
         "_initial_num_input_tokens_seen")  # fmt: skip

_EQUAL = ("loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen")
"""The names of the values in a log entry that are equal on all ranks."""

_Plain = dict[str, Any]  # Any: plain values and tensors


class Bookkeeping:
    """
    Notes the bookkeeping of a Trainer at the end of each step, and restores it.

    - New entries of the log differ between ranks, because they contain times. In the next step, all
      ranks copy the entries of one rank. Until then, `state_dict` has only those values of new
      entries that are equal on all ranks.
    - Each rank adds up its own losses. The ranks exchange these totals before each update window.
      So at the end of the step, when the totals are logged, no rank needs to wait for another.
    """

    def __init__(self, trainer: Any, rank: int, world: int) -> None:
        """
        `trainer` is a `transformers.Trainer`, which has no types.
        """
        self._trainer = trainer
        self._rank = rank
        self._agreed = 0
        """The number of entries at the beginning of the log on which all ranks have agreed."""
        self._missing: list[dict[str, Any]] = []
        """Further entries that other ranks have and this rank does not have, without the values
        that differ between ranks."""
        self._latest: tuple[int, list[dict[str, Any]]] = (0, [])
        """The latest agreement of the ranks: the number of log entries before it, and the entries
        on which the ranks have agreed."""
        self._told = False
        """True if callbacks were already called for the entries in `_missing`."""
        self.totals = torch.zeros(world, 2, dtype=torch.float64, device=trainer.args.device)
        """The total of losses and the floating-point operations of each rank, since the last log."""
        self.epoch = 0
        self.done = 0
        """The number of steps of the epoch `epoch` that are complete."""
        self.facts: tuple[Any, Any] = (None, None)
        """The norm of the gradients and the learning rate of the last step."""
        self._ended: _Plain = {}
        self.received = False
        """True if the bookkeeping came from another rank or from a checkpoint, and was not put into
        the Trainer yet."""

    # ------------------------------------------------------------ what is handed over to tft

    def state_dict(self) -> _Plain:
        """
        Return the bookkeeping of the end of the last step.
        """
        return self._ended

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Store the bookkeeping of the end of a step until `settle` puts it into the Trainer.
        """
        self._ended, self.received = dict(state), True

    def end_step(self) -> None:
        """
        Note the present bookkeeping as that of the end of the step.
        """
        state = self._trainer.state
        totals = {name: getattr(self._trainer, name, 0) for name in _TOTALS}
        self._ended = {
            "state": {name: getattr(state, name) for name in _SHARED},
            "log": state.log_history[: self._agreed],
            "pending": [
                {name: entry[name] for name in _EQUAL if name in entry}
                for entry in state.log_history[self._agreed :]
            ],
            "control": dict(vars(self._trainer.control)),
            "callbacks": [_state_of(callback) for callback in self.stateful()],
            "loop": {**totals, "epoch": self.epoch, "done": self.done},
            "facts": list(self.facts),
            "totals": self.totals.clone(),
        }
        self.received = False

    @property
    def ended_step(self) -> int:
        """
        The number of steps that the Trainer had counted at the end of the last step.
        """
        step: int = self._ended["state"]["global_step"]
        return step

    def logged_last(self) -> dict[str, Any] | None:
        """
        Return the log entry with the loss that the Trainer has made at the end of the last step,
        without its step number. Return None if the Trainer has logged no loss then.
        """
        entries = [*self._ended["log"], *self._ended["pending"]]
        for entry in reversed(entries):
            if entry.get("step") == self.ended_step and "loss" in entry:
                return {name: value for name, value in entry.items() if name != "step"}
        return None

    def settle(self, *, told: bool = False) -> None:
        """
        Put the bookkeeping of the end of the last step into the Trainer. Pass `told=True` if this
        rank's callbacks were already called for the log entries on which the ranks have not agreed
        yet.
        """
        self._told = told
        ended, trainer = self._ended, self._trainer
        for name, value in ended["state"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = list(ended["log"])
        self._agreed, self._missing = len(ended["log"]), ended["pending"]
        vars(trainer.control).update(ended["control"])
        for callback, state in zip(self.stateful(), ended["callbacks"], strict=True):
            _load_state(callback, state)
        for name in _TOTALS:
            setattr(trainer, name, ended["loop"][name])
        self.epoch, self.done = ended["loop"]["epoch"], ended["loop"]["done"]
        norm, rate = ended["facts"]
        self.facts = (norm, rate)
        self.totals = ended["totals"].to(trainer.args.device, copy=True)
        loss, operations = self.totals[self._rank]
        trainer._tr_loss = loss.float()
        trainer.current_flos = operations.item()
        self.received = False

    def stateful(self) -> list[Any]:  # Any: the user's own callbacks may have any type
        """
        Return the callbacks that have a state.
        """
        callbacks = self._trainer.callback_handler.callbacks
        return [each for each in callbacks if isinstance(each, ExportableState) or _keeps(each)]

    # ------------------------------------------------------------ repeating an operation

    def noted(self) -> _Plain:
        """
        Return a copy of the present bookkeeping, which `put_back` can restore when an operation is
        repeated in this process.
        """
        trainer = self._trainer
        totals = {name: getattr(trainer, name, 0) for name in (*_TOTALS, "current_flos")}
        state = dict(vars(trainer.state))
        return {
            "state": {**state, "log_history": list(state["log_history"])},
            "control": dict(vars(trainer.control)),
            "callbacks": [(each, _state_of(each)) for each in self.stateful()],
            "totals": totals,
            "loss": trainer._tr_loss.clone() if hasattr(trainer, "_tr_loss") else None,
            "own": (self._agreed, self._missing, self.totals.clone()),
        }

    def put_back(self, noted: _Plain) -> None:
        """
        Restore the bookkeeping that `noted` has returned in this process.
        """
        trainer = self._trainer
        vars(trainer.state).update(noted["state"])
        trainer.state.log_history = list(noted["state"]["log_history"])
        vars(trainer.control).update(noted["control"])
        for callback, state in noted["callbacks"]:
            _load_state(callback, state)
        for name, value in noted["totals"].items():
            setattr(trainer, name, value)
        if noted["loss"] is not None:
            trainer._tr_loss = noted["loss"].clone()
        self._agreed, self._missing, totals = noted["own"]
        self.totals = totals.clone()

    # ------------------------------------------------------------ with the other ranks

    def exchange(self) -> None:
        """
        Exchange the totals of all ranks, before the update window.
        """
        trainer = self._trainer
        own = torch.stack(
            [
                trainer._tr_loss.double(),
                torch.tensor(float(trainer.current_flos), dtype=torch.float64).to(
                    self.totals.device
                ),
            ]
        )
        found = [torch.empty_like(own) for _ in self.totals]
        dist.all_gather(found, own)
        self.totals = torch.stack(found)

    def agree(self) -> None:
        """
        Replace the log entries on which the ranks have not agreed yet by those of the first rank
        that has all of them. The method uses collectives, so all ranks must call it at the same
        place of the step.
        """
        trainer = self._trainer
        own = trainer.state.log_history[self._agreed :]
        if not own and not self._missing:
            return
        # If this agreement is a repetition, use the entries of the first attempt. The rank that had
        # them may be lost since then.
        place, entries = self._latest
        if place == self._agreed and len(entries) > len(own):
            own = entries
        device = trainer.args.device
        counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in self.totals]
        dist.all_gather(counts, torch.tensor([len(own)], device=device))
        known = [int(count) for count in counts]
        if max(known):
            entries = _broadcast(own, known.index(max(known)), self._rank, device)
        else:
            # no rank has the entries with all values: all ranks have loaded a checkpoint, or the
            # ranks that had these entries were lost
            entries = list(self._missing)
        kinds = [_kind(entry) for entry in own]
        trainer.state.log_history[self._agreed :] = entries
        self._latest = self._agreed, entries
        self._agreed, self._missing = len(trainer.state.log_history), []
        for entry in () if self._told else entries:
            if _kind(entry) not in kinds:
                logs = {name: value for name, value in entry.items() if name != "step"}
                trainer.control = trainer.callback_handler.on_log(
                    trainer.args, trainer.state, trainer.control, logs
                )

    # ------------------------------------------------------------ at the end of a step

    def losses(self) -> torch.Tensor:
        """
        Return the total of losses of each rank, as the Trainer would gather them now.
        """
        return self.totals[:, 0].float()

    def logged(self) -> None:
        """
        Begin new totals of losses, because the Trainer has logged the present ones.
        """
        self._trainer._tr_loss -= self._trainer._tr_loss
        self.totals[:, 0] -= self.totals[:, 0]

    def take_operations(self) -> float:
        """
        Return the floating-point operations of all ranks since the last call, added up as the
        Trainer does it, in 32 bits.
        """
        total = self.totals[:, 1].float().sum().item()
        self.totals[:, 1] = 0
        self._trainer.current_flos = 0
        return total


def _keeps(callback: object) -> bool:
    return hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")


def _state_of(callback: Any) -> Any:
    """
    Return a copy of the state of a callback: `state_dict()`, or else the attributes in `state()`.
    The callback may change its own state in place.
    """
    return deepcopy(callback.state_dict() if _keeps(callback) else callback.state()["attributes"])


def _load_state(callback: Any, state: Any) -> None:
    state = deepcopy(state)  # a copy, because the same `state` may be loaded again
    if _keeps(callback):
        callback.load_state_dict(state)
        return
    for name, value in state.items():
        setattr(callback, name, value)


def _kind(entry: Mapping[str, Any]) -> object:
    return entry.get("step"), tuple(sorted(entry))


def _broadcast(
    entries: Sequence[Mapping[str, Any]], source: int, rank: int, device: torch.device
) -> list[dict[str, Any]]:
    """
    Return the log entries of rank `source` on all ranks.

    The entries are sent as JSON, because the Trainer saves them as JSON too.
    """
    text = json.dumps(entries, default=_number).encode() if rank == source else b""
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, source)
    content = torch.zeros(int(size), dtype=torch.uint8)
    if rank == source:
        content = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    content = content.to(device)
    dist.broadcast(content, source)
    found: list[dict[str, Any]] = json.loads(bytes(content.cpu().numpy()))
    return found


def _number(value: Any) -> Any:  # Any: a number of numpy or torch
    return value.item()
