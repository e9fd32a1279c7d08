"""
The training state of this process. The `StateStore` owns the content of the shards and the
rank-local state, and works on them between incidents and during incidents.

A `Maker` knows the user's objects: where the state is in them, how the wrapper is made, and which
tensor is in which shard. There are two makers. `adopted_maker.py` has the maker for objects that
the script makes itself. `factory_maker.py` has the maker that calls a factory of the script.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from tft.errors import OrderRefused
from tft.spi import Buffer, Made, ShardCopies, ShardPayload, pack
from tft_pytorch.auxiliary_state import forget_stages
from tft_pytorch.backups import Backups, ShardInUse
from tft_pytorch.buckets import Wrappers
from tft_pytorch.device import Devices
from tft_pytorch.memory import Awaited
from tft_pytorch.names import named_parameters
from tft_pytorch.noted import Settings
from tft_pytorch.part_digests import digest, shard_parts
from tft_pytorch.rank_local_state import RankLocalState
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.tensor_holders import Holders
from tft_pytorch.trained import Trained
from tft_pytorch.trees import Plain

_LASTING = ("master.", "optim.state.")
"""Tensors with these names, and parameters, change only within update windows."""


class Maker(Protocol):
    """
    Makes and knows the user's objects, and gives the `StateStore` access to their state.
    """

    wrappers: Wrappers
    """The DDP instances over the present groups, and their layouts."""

    @property
    def made(self) -> Made | None:
        """
        The user's objects; None while the objects do not exist.
        """

    @property
    def lasting(self) -> bool:
        """
        True if the objects live as long as the process. False if they are made anew after every
        incident.
        """

    @property
    def devices(self) -> Devices:
        """The devices on which the model is."""

    def shards(self) -> Mapping[str, Holders]:
        """
        Return the shards that are known, each with the ranks that hold it. An empty tuple of ranks
        means that all ranks hold the shard.
        """

    def learn(self, rank: int, world: int, learned: Callable[[nn.Module], None]) -> None:
        """
        Find out which shards exist. A maker that makes trial objects for this purpose calls
        `learned` with the trial model. Raises `UsageError` if the objects were made for another
        rank or world size.
        """

    def contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        """
        Return the present content of these shards by name. Raises `OrderRefused` if the objects do
        not exist yet.
        """

    def written(self, shard: str, content: ShardContent) -> Mapping[str, Any]:
        """
        Return the present content of a shard in the form that plain torch expects in a checkpoint.
        """

    def weights(self, contents: Sequence[ShardContent]) -> Mapping[str, Tensor]:
        """
        Return the parameters and buffers from which `StateStore.digests` computes the digest
        `parameters`.
        """

    def others(self, contents: Sequence[ShardContent]) -> Mapping[str, Plain]:
        """
        Return the plain values of the scheduler and the `others`, from all shards, by name.
        """

    def room(self, shard: str, meta: bytes) -> Mapping[str, Tensor]:
        """
        Return the tensors into which the content of a shard is to be copied, in the order of its
        description `meta`. Raises `OrderRefused` if the shard is not one of this model.
        """

    def settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> ShardContent | None:
        """
        Copy the received content into the user's objects, and return None. If the user's factory
        is about to make new objects, return the content instead: the `StateStore` keeps it.
        """

    def beside(self, shard: str) -> bytes:
        """
        Return, as bytes, the state of the shard that is not in the user's objects.
        """

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        Note that the script has loaded the shard into its objects. `beside` is the result of the
        method `beside` when the shard was saved.
        """

    def release(self) -> None:
        """
        Drop all references to the process groups, and all objects that refer to them.
        """

    def build(self, kept: Mapping[str, ShardContent]) -> Any:  # Any: whatever the user's code makes
        """
        Make the wrapper, or all objects, over the present process groups, with the content `kept`
        in them. Return what was made.
        """


class StateStore:
    """
    The training state of this process: the hooks of the adaptor call its methods.
    """

    def __init__(self, maker: Maker, data: Any, rngs: Sequence[str]) -> None:  # Any: user's object
        """
        Take charge of the objects of `maker`, if they exist already.

        Raises `UsageError` now for state that cannot be moved to another rank, so that no incident
        fails because of it. None of the user's objects is changed before this check.
        """
        self._maker = maker
        self._wrappers = maker.wrappers
        self._local_state = RankLocalState(nn.Module(), data, rngs)
        self._rehearsal = Rehearsal(self._describe)
        self._settings = Settings()
        self._trained = Trained()
        self.backups = Backups()
        """The copies of the state of earlier steps."""
        self._kept: dict[str, ShardContent] = {}
        """The content by shard while the user's objects do not exist."""
        self._awaited: dict[str, Awaited] = {}
        if maker.made is not None:
            self._describe()
            self._watch(maker.made)
        pack(self._local_state.digestible())

    def _describe(self) -> None:
        for content in self._contents(self._maker.shards()).values():
            refuse_unmovable(content.tensors)
            content.meta()

    def _watch(self, made: Made) -> None:
        parameters = named_parameters(made.model)
        others = others_of(made)
        self._trained.watch(parameters)
        self._local_state.watch(made.model, parameters.values(), others)
        self._rehearsal.watch(made.optimizer, others)
        self._settings.watch([made.optimizer], made.scheduler)

    def _let_go(self) -> None:
        self._settings.watch([], None)
        self._local_state.let_go()
        self._rehearsal.let_go()
        self._trained.let_go()

    @property
    def devices(self) -> Devices:
        """
        The devices on which the model is.
        """
        return self._maker.devices

    # ------------------------------------------------------------ calls between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state at the beginning or, with `closing=True`, at the end of an
        update window.

        At the end also note how gradients are reduced, and check that the state can be moved to
        another rank. Raises `UsageError` if the state cannot be moved.
        """
        if closing:
            self._trained.closing()  # first: the wrappers count the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._local_state.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        Note the settings that the next step may change. Return the rank-local state again if it has
        changed since the update window closed, else None.

        Pass `tail=True` if the loop has marked the end of the tail of the step. Pass `tail=False`
        if the update window has just closed, and the tail has not run yet.
        """
        self._settings.note()
        return self._local_state.end_step(tail=tail)

    def set_aside(self) -> Callable[[], None]:
        """
        Save the present state of the random generators and the modes of the modules. Return a
        function that restores them.
        """
        return self._local_state.set_aside()

    def rollback(self, local_state: bytes) -> None:
        """
        Restore a captured rank-local state. Gradients that the script keeps as zeros are set to
        zero, all others are dropped.

        Each `GradScaler` also forgets how far it has come in the interrupted step.
        """
        self._local_state.rollback(local_state)
        if self._maker.made is not None:
            forget_stages(others_of(self._maker.made))

    def skip(self, batches: int) -> None:
        """
        Make the user's data object leave out its next `batches` batches.
        """
        self._local_state.skip(batches)

    def updated(self) -> None:
        """
        Exchange the parameters that the ranks have updated, if the optimizer is a
        `ReplicaOptimizer`. Called when the update window has closed.
        """
        made = self._maker.made
        if made is not None and isinstance(made.optimizer, ReplicaOptimizer):
            made.optimizer.share_out()

    # ------------------------------------------------------------ groups and wrappers

    def clear(self) -> None:
        """
        Undo the changes of an unfinished step, because this rank may have to give its state to
        another rank. Drop the wrappers and all references to the process groups.
        """
        self.backups.wait()
        self._wrappers.drop()
        self._trained.put_back()  # before another wrapper is built
        self._local_state.rewind()
        self._settings.put_back()
        self._detach()

    def rebuild(self) -> Any:  # Any: whatever the user's code makes
        """
        Let the maker build the wrapper, or all objects, over the present process groups. Return
        what was built.

        The content, and the order in which gradients are reduced, are the same as before.
        """
        self.backups.wait()
        self._wrappers.drop()
        if self._passing():
            self._detach()
        built = self._maker.build(self._kept)
        if not self._maker.lasting and self._maker.made is not None:
            self._watch(self._maker.made)
        self._kept = {}
        self._local_state.running.rest()  # DDP's constructor broadcasts all buffers
        return built

    def _detach(self) -> None:
        """
        Drop all references to the process groups. If the user's objects cannot outlive the groups,
        first keep the content of their shards.
        """
        if self._passing():
            self._kept = self._contents(self._maker.shards())
            self._let_go()
        self._maker.release()

    def _passing(self) -> bool:
        """
        Return whether the user's objects exist and cannot outlive the process groups.
        """
        return not self._maker.lasting and self._maker.made is not None

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold it.

        Raises `UsageError` if the user's objects are those of another rank or world size.
        """
        self._maker.learn(rank, world, self._local_state.learn)
        return [
            ShardCopies(shard=shard, ranks=holders or tuple(range(world)))
            for shard, holders in self._maker.shards().items()
        ]

    def content(self, shard: str) -> ShardContent:
        """
        Return the present content of the shard: the tensors in use, not copies.

        Raises `OrderRefused` if this rank does not have the shard. Raises `UsageError` for state
        that cannot be moved to another rank.
        """
        self._refuse_other(shard)
        return self._contents([shard])[shard]

    def _contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        missing = [shard for shard in shards if shard not in self._kept]
        found = self._maker.contents(missing) if missing else {}
        return {shard: found.get(shard) or self._kept[shard] for shard in shards}

    def give(self, shard: str) -> ShardPayload:
        """
        Return the shard in the form in which it is sent to another rank.
        """
        payload = self.content(shard).payload()
        if not self._has_modes(shard):
            return payload
        return replace(payload, buffers=(*payload.buffers, *self._local_state.modes.give()))

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Reserve memory for a shard with the description `meta`. Return writable buffers for its
        content.

        The buffers are the memory of this process's own tensors where these fit. Else they are new,
        for example for optimizer state that this process does not have yet.
        """
        self._refuse_other(shard)
        self.backups.wait()
        awaited = self._awaited.setdefault(shard, Awaited())
        room = awaited.make(meta, self._maker.room(shard, meta))
        return [*room, *self._local_state.modes.take()] if self._has_modes(shard) else room

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Use the content of a shard whose buffers have all been filled.
        """
        self._refuse_other(shard)
        tensors = self._awaited.setdefault(shard, Awaited()).filled(shard, meta)
        self._settle(shard, meta, tensors)
        if self._has_modes(shard):
            self._local_state.modes.taken()

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the shard under `directory`. Return the names of the written files.
        """
        from tft_pytorch.checkpoints import write  # late import: 1 s, see preload.py

        content = self.content(shard)
        return write(directory, shard, content.meta(), self._maker.written(shard, content))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        Copy the shard. Return a function that writes the copy later.
        """
        from tft_pytorch.checkpoints import stage

        content = self.content(shard)
        return stage(shard, content.meta(), self._maker.written(shard, content))

    def load(self, directory: Path, shard: str) -> None:
        """
        Load a shard that `save` wrote.
        """
        from tft_pytorch.checkpoints import load

        self._refuse_other(shard)
        self.backups.wait()
        self._settle(shard, *load(directory, shard, lambda meta: self._maker.room(shard, meta)))
        self._local_state.modes.forget()

    def beside(self, shard: str) -> bytes:
        """
        Return, as bytes, the state of the shard that is not in the user's objects.

        Raises `OrderRefused` if the user's objects do not have the whole shard now.
        """
        self._refuse_other(shard)
        return self._maker.beside(shard)

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        Note that the script has loaded the shard into the user's objects. `beside` is the result of
        the method `beside` when the shard was saved.

        After the last shard, raises `OrderRefused` if 16-bit parameters differ from their rounded
        masters: then the script has not loaded the masters.
        """
        self._refuse_other(shard)
        self._forget()
        self._local_state.modes.forget()
        self._maker.replaced(shard, beside)

    # ------------------------------------------------------------ copies of earlier steps

    def in_use(self) -> dict[str, ShardInUse]:
        """
        Return all shards of this rank as they are now, to be copied.
        """
        made = self._maker.made
        parameters = {} if made is None else named_parameters(made.model)
        fixed = {f"model.{name}" for name in parameters}
        return {
            shard: ShardInUse(
                meta=content.meta(),
                tensors=content.tensors,
                lasting={n for n in content.tensors if n in fixed or n.startswith(_LASTING)},
                beside=self._local_state.modes.give() if self._has_modes(shard) else (),
            )
            for shard, content in self._contents(self._maker.shards()).items()
        }

    def restore(self, step: int) -> None:
        """
        Take back the copy of the end of `step`. Raises `OrderRefused` if there is none that fits.
        """
        self.backups.put_back(step, self._maker.shards(), self._maker.room, self._settle)
        self._local_state.modes.forget()

    def _settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        content = self._maker.settle(shard, meta, tensors)
        self._forget()
        if content is not None:
            if self._passing():
                self._detach()
            known = {**self._kept, shard: content}
            # in the order of the shards: the first one has the settings of the parameter groups
            self._kept = {name: known[name] for name in self._maker.shards() if name in known}

    def _forget(self) -> None:
        self._local_state.forget()
        self._settings.forget()

    # ------------------------------------------------------------ digests

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._local_state.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return the digests of a shard by part, for comparison with the other holders of the shard.
        """
        # without the modes: they may differ between ranks, since one rank may evaluate for all
        payload = self.content(shard).payload()
        return shard_parts(payload, self._local_state.running.own(payload))

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters` (with the module buffers), `optimizer` (this rank's part of it),
        `scheduler`, the names of the others, and the keys of `RankLocalState.digests`.
        """
        contents = list(self._contents(self._maker.shards()).values())

        def named(prefix: str) -> dict[str, Tensor]:
            return {n: t for each in contents for n, t in each.named(prefix).items()}

        trees: list[Plain] = [each.optimizer for each in contents]
        return {
            "parameters": digest(self._local_state.extra.noted()[0], self._maker.weights(contents)),
            "optimizer": digest(trees, named("optim") | named("master")),
            "scheduler": digest(None, {}),
            **{
                name: digest(tree, named(name))
                for name, tree in self._maker.others(contents).items()
            },
            **self._local_state.digests(),
        }

    # ------------------------------------------------------------ one shard

    def _has_modes(self, shard: str) -> bool:
        """
        Return whether the modes of the modules are sent together with this shard.
        """
        return self._maker.lasting and shard == next(iter(self._maker.shards()))

    def _refuse_other(self, shard: str) -> None:
        known = self._maker.shards()
        if shard not in known:
            raise OrderRefused(f"this rank has no shard {shard!r}; it has {list(known)}")


def others_of(made: Made) -> dict[str, Any]:  # Any: each has its own type
    """
    Return the scheduler, if there is one, and the others by name.
    """
    scheduler = {} if made.scheduler is None else {"scheduler": made.scheduler}
    return {**scheduler, **made.others}
