"""
The training state of this process: the model, the optimizer and the other objects that the user
passes to `session.adopt`. This module checks these objects, captures and restores their state, and
gives tft the state that is sent to other ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog
from mindspore import Parameter
from mindspore.communication import GlobalComm
from mindspore.nn import Cell

from tft.errors import OrderRefused, UsageError
from tft.spi import (
    Buffer,
    ShardCopies,
    ShardPayload,
    SliceContent,
    check_parts,
    pack,
    part_digests,
)
from tft_mindspore import checkpoints, step_numbers
from tft_mindspore.kept_attributes import KeptAttributes
from tft_mindspore.memory import digest, drop_unfinished_backward
from tft_mindspore.process import model_train
from tft_mindspore.rank_local_state import RankLocalState
from tft_mindspore.state import DENSE, Part, Shard, group_values, is_setting, named_parameters

_PARTS = frozenset(
    {"model", "optimizer", "scheduler", "others", "data", "rng", "shards", "elsewhere"}
)

_TAKEN = frozenset({"model", "optimizer", "scheduler", "data", "rng", "parameters"})
"""Names that an object in `others` cannot have, because the state and its digests use these names for
other parts."""

log = structlog.get_logger()


def begun() -> str | None:
    """
    Return a text that names the MindSpore feature which has already connected this process to other
    processes. Return None if MindSpore has not connected this process.
    """
    return "collective communication (mindspore.communication.init)" if GlobalComm.INITED else None


def adopt(
    parts: Mapping[str, Any],  # Any: the user's objects may have any class
    wrap: Callable[[], Any] | None,
) -> "Adopted":
    """
    Take charge of the user's objects and return the training state. Raises `UsageError` for objects
    that the adaptor cannot handle.
    """
    _check(parts)
    scheduler = parts.get("scheduler")
    others = {
        **({} if scheduler is None else {"scheduler": scheduler}),
        **parts.get("others", {}),
    }
    trained = model_train()
    adopted = Adopted(
        model=parts["model"],
        optimizer=parts["optimizer"],
        others=others,
        data=parts.get("data"),
        rngs=parts.get("rng") or ("mindspore",),
        wrap=wrap,
        shards=parts.get("shards", {}),
        elsewhere=parts.get("elsewhere", ()),
        callbacks=None if trained is None else trained.kept,
    )
    adopted.begin()
    return adopted


class Adopted:
    """
    The training state in the objects that `adopt` has taken charge of.
    """

    def __init__(
        self,
        *,
        model: Cell,
        optimizer: Cell,
        others: Mapping[str, Any],  # Any: the user's objects may have any class
        data: Any,  # Any: the user's data object may have any class
        rngs: Sequence[str],
        wrap: Callable[[], Any] | None,
        shards: Mapping[str, Part],
        elsewhere: Sequence[str],
        callbacks: KeptAttributes | None = None,
    ) -> None:
        self._model = model
        self._wrap = wrap
        self._weights = named_parameters(model)
        self._kept = _of_the_optimizer(optimizer, self._weights)
        held = {name: each for name, each in others.items() if isinstance(each, Parameter)}
        kept = {name: each for name, each in others.items() if name not in held}
        self._others = kept
        _check_held(held, {**self._weights, **self._kept})
        everything = {**self._weights, **self._kept, **held}
        _check_parts(shards, elsewhere, everything)
        apart = {name for part in shards.values() for name in part.names} | set(elsewhere)
        dense = {name: each for name, each in everything.items() if name not in apart}
        self._shards: dict[str, Shard] = {}
        if dense or kept:
            self._shards[DENSE] = Shard(DENSE, dense, (), optimizer=optimizer, others=kept)
        for name, part in shards.items():
            own = {each: everything[each] for each in everything if each in set(part.names)}
            self._shards[name] = Shard(name, own, tuple(sorted(part.ranks)))
        self._local_state = RankLocalState(model, data, rngs, callbacks)

    def begin(self) -> None:
        """
        Make the descriptions of all shards once, as a test. If some state cannot be moved to
        another rank, this raises an error when training begins, and not during an incident.
        """
        for shard in self._shards.values():
            shard.meta()
        self._local_state.digests()

    # ------------------------------------------------------------ calls between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state at the beginning or, with `closing=True`, at the end of an
        update window.
        """
        return self._local_state.capture(closing=closing)

    def end_step(self) -> bytes | None:
        """
        Return the rank-local state at the end of a step. Return None if this state has not changed
        since the update window closed. Also drop the norms of arrays that the script has averaged
        after the update, because these arrays are no gradients.
        """
        step_numbers.watch.forget()
        return self._local_state.end_step()

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state. Return a sentence if a part of it was lost. Gradients
        need not be dropped, because no object of MindSpore keeps them.
        """
        return self._local_state.rollback(local_state)

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches of the data.
        """
        self._local_state.skip(batches)

    def clear(self) -> None:
        """
        Drop MindSpore's record of an unfinished forward pass, and undo the changes that this pass
        has made to the running statistics. After that, this rank can send its state to another
        rank.
        """
        drop_unfinished_backward()
        self._local_state.rewind()

    def rebuild(self) -> Any:  # Any: the user's factory may return any object
        """
        Return the object that the training loop calls: the result of the user's function `wrap`.
        Return the model if the user has passed no such function.
        """
        return self._model if self._wrap is None else self._wrap()

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold the shard.

        Raises `UsageError` if the holders that the user has named for a shard include a rank that
        the job does not have, or do not include this rank.
        """
        for shard in self._shards.values():
            if shard.ranks and (rank not in shard.ranks or shard.ranks[-1] >= world):
                raise UsageError(
                    f"shards names the ranks {list(shard.ranks)} as holders of {shard.name!r}, but "
                    f"this is rank {rank} of {world}: name the ranks of this job that hold the "
                    "same state as this rank"
                )
        return [
            ShardCopies(shard=shard.name, ranks=shard.ranks or tuple(range(world)))
            for shard in self._shards.values()
        ]

    def give(self, shard: str) -> ShardPayload:
        """
        Return the shard in the form in which it is sent to another rank.
        """
        return self._shard(shard).give()

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Reserve memory for a shard with the description `meta`. Return the memory as writable
        buffers.
        """
        return self._shard(shard).take(meta)

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Put the received shard into use. This method is called when the content of all buffers that
        `take` returned has arrived.
        """
        self._shard(shard).taken(meta)
        self._local_state.forget()

    def save(self, directory: Path, shard: str, step: int) -> list[str]:
        """
        Write the shard under `directory`. Return the names of the written files.
        """
        return checkpoints.save(directory, self._shard(shard), step)

    def stage(self, shard: str, step: int) -> Callable[[Path], list[str]]:
        """
        Copy the shard. Return a function that writes the copy into a directory later.
        """
        return checkpoints.stage(self._shard(shard), step)

    def load(self, directory: Path, shard: str) -> None:
        """
        Load a shard that `save` wrote.
        """
        checkpoints.load(directory, self._shard(shard))
        self._local_state.forget()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return a digest of each part of a shard, by the name of the part, for comparison with the
        other holders of the shard. A part that may differ between ranks has an empty digest.
        """
        parts = part_digests(self.give(shard), dict.fromkeys(self._own(shard), True))
        return {**parts, "description": ""}

    def slices(self, shard: str) -> SliceContent:
        """
        Return that content of a shard which is equal on all holders of the shard. The holders
        compare this content while the job trains.
        """
        own = self._own(shard)
        kept = [buffer for buffer in self.give(shard).buffers if buffer.name not in own]
        # MindSpore may carry out operations later, and only `give` waits until they are done. So
        # tft may read these buffers only in this step, and must call `give` again in the next step.
        return SliceContent.of_one_step(b"", kept)

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._local_state.generators()

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.
        """
        held = {name for shard in self._shards.values() for name in shard.parameters}
        plain = [shard.plain()["groups"] for shard in self._shards.values()]
        return {
            "parameters": digest(None, self._weights),
            "optimizer": digest(plain, {n: p for n, p in self._kept.items() if n in held}),
            "scheduler": digest(None, {}),
            **{name: digest(other.state_dict(), {}) for name, other in self._others.items()},
            **self._local_state.digests(),
        }

    def _own(self, shard: str) -> set[str]:
        """
        Return the names of the parameters of a shard that are not compared with other ranks.
        """
        parameters = self._shard(shard).parameters
        # Do not compare settings such as the learning rate, because a script may change a setting
        # in a step that only some ranks have begun.
        return {*self._local_state.owned(parameters), *(n for n in parameters if is_setting(n))}

    def _shard(self, name: str) -> Shard:
        if name not in self._shards:
            raise OrderRefused(
                f"this rank has no shard {name!r}; the shards of this rank are {list(self._shards)}"
            )
        return self._shards[name]


# ---------------------------------------------------------------- checks


def _of_the_optimizer(optimizer: Cell, weights: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the optimizer's own parameters, such as moments. Leave out the model's parameters, which
    the optimizer trains.

    Raises `UsageError` if the optimizer trains parameters that the model does not have, or if model
    and optimizer have different parameters with the same name.
    """
    found = {**named_parameters(optimizer), **group_values(optimizer)[0]}
    for name, parameter in found.items():
        if name in weights and weights[name] is not parameter:
            raise UsageError(
                f"the optimizer and the model have different parameters with the name {name!r}: "
                "make the optimizer over the parameters of this model"
            )
    known = {id(parameter) for parameter in weights.values()}
    own = {name: each for name, each in found.items() if id(each) not in known}
    trained = {id(parameter) for parameter in optimizer.parameters}
    strangers = [name for name, parameter in own.items() if id(parameter) in trained]
    if strangers:
        raise UsageError(
            f"the optimizer trains {', '.join(strangers)}, which the model does not have: put all "
            "that is trained into one Cell"
        )
    return own


def _check(parts: Mapping[str, Any]) -> None:  # Any: the user's objects may have any class
    check_parts(parts, _PARTS, "mindspore")
    model, optimizer = parts.get("model"), parts.get("optimizer")
    if not isinstance(model, Cell):
        raise UsageError(
            "the model given to session.adopt must be a mindspore.nn.Cell, not a "
            f"{type(model).__name__}"
        )
    if not isinstance(optimizer, Cell) or not hasattr(optimizer, "parameters"):
        raise UsageError(
            "the optimizer given to session.adopt must be an optimizer of MindSpore, not a "
            f"{type(optimizer).__name__}"
        )
    for name in ("scheduler", "data"):
        _check_state(name, parts.get(name))
    for name, other in parts.get("others", {}).items():
        if name in _TAKEN:
            raise UsageError(
                f"the argument others has the name {name!r}, which is reserved: choose another name "
                "for the object"
            )
        if not isinstance(other, Parameter):
            _check_state(f"others[{name!r}]", other)
    if begun() is not None:
        raise UsageError(
            "MindSpore's own process groups cannot be formed again in a process, so the loss of "
            "one rank would end all ranks: remove mindspore.communication.init from the script, "
            "and all-reduce gradients with tft_mindspore.group()"
        )
    for _, cell in model.cells_and_names():
        if "Dropout" in type(cell).__name__:
            log.warning(
                "random_numbers_not_kept",
                cell=type(cell).__name__,
                see="docs/reference/mindspore.md",
            )
            break


def _check_state(name: str, each: Any) -> None:  # Any: the user's object may have any class
    if each is None:
        return
    if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
        raise UsageError(
            f"the object {name} given to session.adopt must have the methods state_dict() and "
            f"load_state_dict(state), which a {type(each).__name__} does not have"
        )
    try:
        pack(each.state_dict())
    except UsageError as error:
        raise UsageError(f"the state of {name} does not consist of plain values: {error}") from None


def _check_held(held: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """
    Check that no Parameter `held` of the argument `others` has the name of another Parameter in
    `known`, those of the model and the optimizer. Only one of the two would be sent and saved.
    """
    for name, parameter in held.items():
        if known.get(name, parameter) is not parameter:
            raise UsageError(
                f"the argument others has a Parameter with the name {name!r}, and the model or the "
                "optimizer has another Parameter with this name: choose another name"
            )


def _check_parts(
    shards: Mapping[str, Any],  # Any: the user's values are not checked yet
    elsewhere: Sequence[str],
    everything: Mapping[str, Any],
) -> None:
    seen: dict[str, str] = dict.fromkeys(elsewhere, "elsewhere")
    for name in elsewhere:
        if name not in everything:
            raise UsageError(
                f"the argument elsewhere names the parameter {name!r}, which neither model nor "
                "optimizer has"
            )
    for shard, part in shards.items():
        if shard == DENSE or not isinstance(part, Part) or not part.names or not part.ranks:
            raise UsageError(
                f"shards[{shard!r}] must be a tft_mindspore.Part with names and ranks, and its "
                f"name must not be {DENSE!r}, which stands for the state of all ranks"
            )
        for name in part.names:
            if name not in everything:
                raise UsageError(
                    f"shards[{shard!r}] names the parameter {name!r}, which neither model nor "
                    "optimizer has"
                )
            if name in seen:
                raise UsageError(
                    f"the parameter {name!r} is named in {seen[name]!r} and in {shard!r}: name "
                    "each parameter in only one of them"
                )
            seen[name] = shard
