"""
The training state of this process: owns the content of its shards and the rank-local state, and
works on them between incidents and during incidents.

A `Maker` knows the user's objects: how the state is found in them, how the wrapper is made, and
which tensor is in which shard. There are two makers. `adopted_maker.py` has the one for objects
that the script made itself, `factory_maker.py` the one that calls a factory of the script's.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from tft.errors import OrderRefused
from tft.spi import Buffer, Made, ShardCopies, ShardPayload, pack
from tft_pytorch.auxiliary_state import forget_stages
from tft_pytorch.buckets import Wrappers
from tft_pytorch.memory import Awaited
from tft_pytorch.names import named_parameters
from tft_pytorch.noted import Settings
from tft_pytorch.part_digests import digest, shard_parts
from tft_pytorch.rank_local_state import Private
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.tensor_holders import Holders
from tft_pytorch.trained import Trained
from tft_pytorch.trees import Plain


class Maker(Protocol):
    """
    The user's objects, as the `StateStore` sees them.
    """

    wrappers: Wrappers
    """The DDP instances over the present groups, and their layouts."""

    @property
    def made(self) -> Made | None:
        """The user's objects; None while they do not exist."""

    @property
    def lasting(self) -> bool:
        """Whether the objects stay the same for as long as the process lives."""

    @property
    def on_cuda(self) -> bool:
        """Whether gradients are reduced between CUDA devices."""

    def shards(self) -> Mapping[str, Holders]:
        """Return the shards that are known, each with the ranks that hold it; no ranks if all ranks
        do."""

    def learn(self, rank: int, world: int, learned: Callable[[nn.Module], None]) -> None:
        """Find out which shards there are. Call `learned` with the model if the objects of this
        call are not those that will be trained. Raises `UsageError` for objects of another rank or
        world size."""

    def contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        """Return the present content of these shards by name. Raises `OrderRefused` if there is
        none."""

    def written(self, shard: str, content: ShardContent) -> Mapping[str, Any]:
        """Return the present content of a shard as plain torch has it in a checkpoint."""

    def weights(self, contents: Sequence[ShardContent]) -> Mapping[str, Tensor]:
        """Return the parameters and buffers of which `StateStore.digests` is made."""

    def others(self, contents: Sequence[ShardContent]) -> Mapping[str, Plain]:
        """Return the plain values of the others in all shards, by the names of the others."""

    def room(self, shard: str, meta: bytes) -> Mapping[str, Tensor]:
        """Return the tensors to be filled for a description, in its order. Raises `OrderRefused`
        if the shard is not one of this model."""

    def settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> ShardContent | None:
        """Put the content that has arrived into the objects. Return it if there are no objects that
        could have it: then the store keeps it."""

    def beside(self, shard: str) -> bytes:
        """Return the state that belongs to the shard but is not in the user's objects."""

    def replaced(self, shard: str, beside: bytes) -> None:
        """Take note that the script has loaded the shard into its objects."""

    def release(self) -> None:
        """Drop all references to the groups, and objects that have such references."""

    def build(self, kept: Mapping[str, ShardContent]) -> Any:  # Any: whatever the user's code makes
        """Make the wrapper over the present groups, or all objects, with the content `kept` in
        them. Return what was made."""


class StateStore:
    """
    The training state of this process.
    """

    def __init__(self, maker: Maker, data: Any, rngs: Sequence[str]) -> None:  # Any: user's object
        """
        Take charge of the objects that `maker` has, if it has any yet.

        Nothing of the user's is touched before state that cannot be moved is refused. Raises
        `UsageError` for such state: now, and not in an incident.
        """
        self._maker = maker
        self._wrappers = maker.wrappers
        self._private = Private(nn.Module(), data, rngs)
        self._rehearsal = Rehearsal(self._describe)
        self._settings = Settings()
        self._trained = Trained()
        self._kept: dict[str, ShardContent] = {}
        """The content by shard while the user's objects do not exist."""
        self._awaited: dict[str, Awaited] = {}
        if maker.made is not None:
            self._describe()
            self._watch(maker.made)
        pack(self._private.digestible())

    def _describe(self) -> None:
        for content in self._contents(self._maker.shards()).values():
            refuse_unmovable(content.tensors)
            content.meta()

    def _watch(self, made: Made) -> None:
        parameters = named_parameters(made.model)
        others = others_of(made)
        self._trained.watch(parameters)
        self._private.watch(made.model, parameters.values(), others)
        self._rehearsal.watch(made.optimizer, others)
        self._settings.watch([made.optimizer], made.scheduler)

    def _let_go(self) -> None:
        self._settings.watch([], None)
        self._private.let_go()
        self._rehearsal.let_go()
        self._trained.let_go()

    @property
    def on_cuda(self) -> bool:
        """
        Whether gradients are reduced between CUDA devices.
        """
        return self._maker.on_cuda

    # ------------------------------------------------------------ between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state, at an edge of an update window.

        At the closing edge, also note what the step leaves behind. Raises `UsageError` if that
        could not be moved in an incident.
        """
        if closing:
            self._trained.closing()  # first: the wrappers count the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._private.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        Note the settings that the next step may change. Return the rank-local state anew if it has
        changed since the update window closed, else None.

        `tail` True: the loop has marked the end of the step. `tail` False: the update window has
        just closed, and the tail is still to come.
        """
        self._settings.note()
        return self._private.end_step(tail=tail)

    def set_aside(self) -> Callable[[], None]:
        """
        Return a function that restores the random generators and the modes of modules to their
        present state.
        """
        return self._private.set_aside()

    def rollback(self, private: bytes) -> None:
        """
        Restore a captured rank-local state. Set the gradients to zero where the script keeps them,
        and drop the others.

        Also forget how far a `GradScaler` has come in the step that was given up.
        """
        self._private.rollback(private)
        if self._maker.made is not None:
            forget_stages(others_of(self._maker.made))

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        self._private.skip(batches)

    def updated(self) -> None:
        """
        Give every rank the parameters that other ranks have updated. Called when the update window
        has closed.
        """
        made = self._maker.made
        if made is not None and isinstance(made.optimizer, ReplicaOptimizer):
            made.optimizer.share_out()

    # ------------------------------------------------------------ groups and wrappers

    def clear(self) -> None:
        """
        Undo what an unfinished step has changed: this rank may have to give its state away. Drop
        the wrappers and all references to the groups.
        """
        self._wrappers.drop()
        self._trained.put_back()  # before another wrapper is built
        self._private.rewind()
        self._settings.put_back()
        self._detach()

    def rebuild(self) -> Any:  # Any: whatever the user's code makes
        """
        Have the wrapper or all objects made for the present groups, with the content and the order
        of gradient reduction from before. Return what was made.
        """
        self._wrappers.drop()
        if self._passing():
            self._detach()
        built = self._maker.build(self._kept)
        if not self._maker.lasting and self._maker.made is not None:
            self._watch(self._maker.made)
        self._kept = {}
        self._private.running.rest()  # DDP's constructor broadcasts all buffers
        return built

    def _detach(self) -> None:
        """
        Drop all references to the groups. Keep the content of the shards apart from objects that do
        not outlive the groups.
        """
        if self._passing():
            self._kept = self._contents(self._maker.shards())
            self._let_go()
        self._maker.release()

    def _passing(self) -> bool:
        """
        Return whether there are objects that do not outlive the groups.
        """
        return not self._maker.lasting and self._maker.made is not None

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold it.

        Raises `UsageError` if the user's objects are those of another rank or world size.
        """
        self._maker.learn(rank, world, self._private.running.learn)
        return [
            ShardCopies(shard=shard, ranks=holders or tuple(range(world)))
            for shard, holders in self._maker.shards().items()
        ]

    def content(self, shard: str) -> ShardContent:
        """
        Return the present content of the shard: the tensors in use, not copies.

        Raises `OrderRefused` if there is none, `UsageError` for state that cannot be moved.
        """
        self._refuse_other(shard)
        return self._contents([shard])[shard]

    def _contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        missing = [shard for shard in shards if shard not in self._kept]
        found = self._maker.contents(missing) if missing else {}
        return {shard: found.get(shard) or self._kept[shard] for shard in shards}

    def give(self, shard: str) -> ShardPayload:
        """
        Return the shard in the form in which it is moved.
        """
        payload = self.content(shard).payload()
        if not self._has_modes(shard):
            return payload
        return replace(payload, buffers=(*payload.buffers, *self._private.modes.give()))

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for a shard with the description `meta`. Return the writable buffers.

        They belong to this process's own tensors where these fit, else to new tensors, such as
        those for optimizer state that this process does not have yet.
        """
        self._refuse_other(shard)
        awaited = self._awaited.setdefault(shard, Awaited())
        room = awaited.make(meta, self._maker.room(shard, meta))
        return [*room, *self._private.modes.take()] if self._has_modes(shard) else room

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Use the shard whose buffers have all arrived.
        """
        self._refuse_other(shard)
        tensors = self._awaited.setdefault(shard, Awaited()).filled(shard, meta)
        self._settle(shard, meta, tensors)
        if self._has_modes(shard):
            self._private.modes.taken()

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
        self._settle(shard, *load(directory, shard, lambda meta: self._maker.room(shard, meta)))
        self._private.modes.forget()

    def beside(self, shard: str) -> bytes:
        """
        Return, as bytes, the state that belongs to the shard but is not in the user's objects.

        Raises `OrderRefused` if the user's objects do not have all of the shard now.
        """
        self._refuse_other(shard)
        return self._maker.beside(shard)

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        Take note that the script has loaded the shard into the user's objects.

        When this is the last of the shards, raises `OrderRefused` if the script left master weights
        as they were.
        """
        self._refuse_other(shard)
        self._forget()
        self._private.modes.forget()
        self._maker.replaced(shard, beside)

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
        self._private.forget()
        self._settings.forget()

    # ------------------------------------------------------------ digests

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._private.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return the digests of a shard by part, for comparison with the other holders of the shard.
        """
        # without the modes: they may differ between ranks, since one rank may evaluate for all
        payload = self.content(shard).payload()
        return shard_parts(payload, self._private.running.own(payload))

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters` (with the module buffers), `optimizer` (this rank's part of it),
        `scheduler`, the names of the others, and those of the rank-local state.
        """
        contents = list(self._contents(self._maker.shards()).values())

        def named(prefix: str) -> dict[str, Tensor]:
            return {n: t for each in contents for n, t in each.named(prefix).items()}

        trees: list[Plain] = [each.optimizer for each in contents]
        return {
            "parameters": digest(self._private.extra.noted()[0], self._maker.weights(contents)),
            "optimizer": digest(trees, named("optim") | named("master")),
            "scheduler": digest(None, {}),
            **{
                name: digest(tree, named(name))
                for name, tree in self._maker.others(contents).items()
            },
            **self._private.digests(),
        }

    # ------------------------------------------------------------ one shard

    def _has_modes(self, shard: str) -> bool:
        """
        Return whether the modes of modules are moved with this shard.
        """
        return self._maker.lasting and shard == next(iter(self._maker.shards()))

    def _refuse_other(self, shard: str) -> None:
        known = self._maker.shards()
        if shard not in known:
            raise OrderRefused(f"this rank has the shards {list(known)}, and no {shard!r}")


def others_of(made: Made) -> dict[str, Any]:  # Any: each has its own type
    """
    Return the scheduler, if there is one, and the others by name.
    """
    scheduler = {} if made.scheduler is None else {"scheduler": made.scheduler}
    return {**scheduler, **made.others}
