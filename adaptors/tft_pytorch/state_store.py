"""
Manages the training state of this process. A `StateStore` owns the content of the shards and the
rank-local state, and works on both between incidents and during incidents.

A `Maker` has the user's objects. It knows where the state is in these objects, how the wrapper is
made, and which tensor is in which shard. There are two makers. `adopted_maker.py` has the maker for
objects that the script makes itself. `factory_maker.py` has the maker that calls the user's factory
function.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from tft.errors import OrderRefused
from tft.spi import Buffer, Made, ShardCopies, ShardPayload, SliceContent, pack
from tft.spi.generators import GLOBAL
from tft_pytorch import step_numbers
from tft_pytorch.auxiliary_state import forget_stages, parameters_beside, set_directly
from tft_pytorch.backups import Backups, ShardInUse
from tft_pytorch.buckets import Wrappers
from tft_pytorch.contributions import Contributions
from tft_pytorch.device import Devices
from tft_pytorch.given_back import given, refuse_changed
from tft_pytorch.guard import Guard
from tft_pytorch.memory import Awaited
from tft_pytorch.names import named_parameters
from tft_pytorch.noted import Settings
from tft_pytorch.overlaps import Overlaps
from tft_pytorch.part_digests import digest, model_part, shard_parts, slice_content
from tft_pytorch.rank_local_state import RankLocalState
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.replicas import ReplicaOptimizer
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.tensor_holders import Holders
from tft_pytorch.trained import Trained
from tft_pytorch.trees import Plain
from tft_pytorch.unchanged import Unchanged
from tft_pytorch.unkept_generators import UnkeptGenerators

_LASTING = ("master.", "optim.state.")
"""Prefixes of the names of tensors. Tensors with these prefixes change only within update windows.
Parameters also change only within update windows."""


class Maker(Protocol):
    """
    Makes the user's objects or gets them from the script, and gives the `StateStore` access to the
    state of these objects.
    """

    wrappers: Wrappers
    """The DDPs over the present process groups, and the bucket layout of each DDP (which gradients
    it reduces together)."""

    @property
    def made(self) -> Made | None:
        """
        The user's objects; None while the objects do not exist.
        """

    @property
    def lasting(self) -> bool:
        """
        True if the user's objects live as long as the process. False if the objects are made again
        after every incident.
        """

    @property
    def devices(self) -> Devices:
        """The devices on which the model is."""

    @property
    def column(self) -> Holders:
        """
        The ranks that compute with the same copy of the model as this rank. Empty if this rank has
        a whole copy of the model, or before the method `learn` was called.
        """

    def shards(self) -> Mapping[str, Holders]:
        """
        Return the names of the shards that are known, each with the ranks that hold the shard. An
        empty tuple of ranks means that all ranks hold the shard.
        """

    def learn(self, rank: int, world: int, learned: Callable[[nn.Module], None]) -> None:
        """
        Find out which shards exist. If the maker has to make trial objects for this purpose, the
        maker calls `learned` with the trial model. Raises `UsageError` if the user's objects were
        made for another rank or world size.
        """

    def contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        """
        Return the present content of the shards `shards`, by the name of the shard. Raises
        `OrderRefused` if the user's objects do not exist yet.
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
        Return the plain values of the state of the scheduler and of the user's other objects, from
        all shards, by the name of the object.
        """

    def room(self, shard: str, meta: bytes) -> Mapping[str, Tensor]:
        """
        Return the tensors into which the content of a shard is to be copied, in the order of the
        packed description `meta` of the shard. Raises `OrderRefused` if the shard does not belong
        to this model.
        """

    def settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> ShardContent | None:
        """
        Put the received content of a shard into the user's objects, and return None. If the user's
        factory will make new objects, return the content instead: the `StateStore` keeps the
        content until the new objects exist.
        """

    def beside(self, shard: str) -> bytes:
        """
        Return that state of the shard which is not in the user's objects, packed: the order in
        which DDP reduces the gradients."""

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        Note that the script itself has loaded the content of the shard into its objects. `beside`
        is the result of the method `beside` when the shard was saved.
        """

    def release(self) -> None:
        """
        Drop all references to the process groups, and to objects that refer to process groups.
        """

    def build(self, kept: Mapping[str, ShardContent]) -> Any:  # Any: the user's own objects
        """
        Make the wrapper, or all of the user's objects, over the present process groups. Return the
        made objects. `kept` has the content for objects that are made again, by the name of the
        shard.
        """


class StateStore:
    """
    The training state of this process. The hooks of the adaptor call the methods of this class.
    """

    # Any: `data` is the user's own object and may have any type
    def __init__(
        self, maker: Maker, data: Any, rngs: Sequence[str], *, attributes: bool = False
    ) -> None:
        """
        Begin to watch the user's objects in `maker`, if these objects exist already. With
        `attributes`, keep plain attributes of modules too, and look for draws from global generators
        that are not in `rngs`.

        Raises `UsageError` for state that cannot be moved to another rank, because otherwise the
        first incident would fail. This check comes before any change of the user's objects.
        """
        self._maker = maker
        self._attributes = attributes
        self._wrappers = maker.wrappers
        self._local_state = RankLocalState(nn.Module(), data, rngs)
        self._rehearsal = Rehearsal(
            self._describe, lambda tensors: self._overlaps.refuse_new(tensors, self._optimizers())
        )
        self._generators = UnkeptGenerators(rngs if attributes else GLOBAL)
        self._settings = Settings()
        self._trained = Trained()
        self._contributions = Contributions()
        self.backups = Backups()
        """The copies of this rank's state at the ends of earlier steps."""
        self._kept: dict[str, ShardContent] = {}
        """The content of each shard, while the user's objects do not exist. Empty while the objects
        exist."""
        self._awaited: dict[str, Awaited] = {}
        self._unchanged = Unchanged()
        self._overlaps = Overlaps()
        self._guard: Guard | None = None
        """Watches the state while a function runs that is called after a step."""
        if maker.made is not None:
            self._overlaps.known(self._describe(), self._optimizers())
            self._watch(maker.made)
        pack(self._local_state.digestible())

    def _describe(self) -> dict[str, Tensor]:
        contents = self._contents(self._maker.shards()).values()
        for content in contents:
            refuse_unmovable(content.tensors)
            content.meta()
        return {name: tensor for each in contents for name, tensor in each.tensors.items()}

    def _optimizers(self) -> set[str]:
        """
        Return the first words of the names of tensors that belong to an optimizer whose state is set
        directly.
        """
        made = self._maker.made
        others = {} if made is None else others_of(made)
        return {"optim"} | {name for name, each in others.items() if set_directly(each)}

    def _watch(self, made: Made) -> None:
        parameters = named_parameters(made.model)
        others = others_of(made)
        self._trained.watch(parameters)
        self._contributions.watch(made.model, parameters.values())
        trained = [*parameters.values(), *parameters_beside(made)]
        self._local_state.watch(made.model, trained, others)
        if self._attributes:
            modules = (each for each in others.values() if isinstance(each, nn.Module))
            self._local_state.attributes.watch(made.model, *modules)
        self._rehearsal.watch(made.optimizer, others)
        optimizers = [each for each in others.values() if isinstance(each, Optimizer)]
        schedulers = [
            each
            for name, each in others.items()
            if name == "scheduler" or isinstance(each, LRScheduler)
        ]
        self._settings.watch([made.optimizer, *optimizers], schedulers)

    def _let_go(self) -> None:
        self._settings.watch([], [])
        self._local_state.let_go()
        self._rehearsal.let_go()
        self._trained.let_go()
        self._contributions.let_go()

    @property
    def devices(self) -> Devices:
        """
        The devices on which the model is.
        """
        return self._maker.devices

    # ------------------------------------------------------------ calls between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the present rank-local state, packed. Pass `closing=True` when an update window
        closes. Other calls come before the last all-reduce of a step, and when a window opens.

        With `closing=True`, also note the bucket layouts of the DDPs, and check that the state can
        be moved to another rank. Raises `UsageError` if the state cannot be moved.
        """
        if closing:
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
            self._unchanged.forget()
        return self._local_state.capture(closing=closing)

    def opening(self) -> None:
        """
        Check, before an update window opens, that the script has not changed which parameters are
        trained, and that no tensors of the optimizer share memory. Raises `UsageError` otherwise.
        The state is still that of the end of the step before, so that a last checkpoint can be
        written.
        """
        self._trained.opening()
        self._rehearsal.opening()

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        Note the settings that the next step may change, such as learning rates. Return the
        rank-local state at the end of the step if it has changed since the update window closed,
        else None.

        Pass `tail=True` if the loop has marked the end of the tail of the step. Pass `tail=False`
        if the update window has just closed, and the tail has not run yet. Losses and gradient
        norms of backward passes in the tail are dropped.
        """
        step_numbers.watch.begin_step()
        self._settings.note()
        return self._local_state.end_step(tail=tail)

    def before_abort(self) -> None:
        """
        Called on another thread before collectives are aborted on a device.

        From then on the script may compute with wrong results. So note what is noted at the end of a
        step, such as the state of the scheduler, if the script is in the tail of a step.
        """
        self._settings.note_in_tail()

    def set_aside(self) -> Callable[[], None]:
        """
        Save the present state of the random generators, the modes and extra states of the modules,
        and the buffers that the forward pass changes. Return a function that restores these, and
        forgets the gradients and losses that were seen since.
        """
        put_back = self._local_state.set_aside()

        def done() -> None:
            put_back()
            self._generators.rest()
            self._contributions.forget()
            step_numbers.watch.forget()

        return done

    def guard(self, room: int) -> Guard | None:
        """
        Watch the state from now on, while a function of the user runs that must not change it. Keep
        a copy of the parameters if it has at most `room` bytes. Return None if the user's objects
        do not exist now.
        """
        made = self._maker.made
        self._guard = None if made is None else Guard(made, room)
        return self._guard

    def rollback(self, local_state: bytes) -> str | None:
        """
        Restore a captured rank-local state. Gradients that the script keeps as zeros are set to
        zero. All other gradients are dropped. Return a sentence if a part of the state was lost.

        Each `GradScaler` also forgets how far it has come in the interrupted step. The noted losses
        and gradient norms are dropped. They come from the interrupted step, or from backward passes
        that tft ran to free and to build wrappers. Raises `StateChanged` if the last `rebuild` has
        changed the parameters.
        """
        self._unchanged.wait()
        self._generators.forget()
        step_numbers.watch.forget()
        lost = self._local_state.rollback(local_state)
        if self._maker.made is not None:
            forget_stages(others_of(self._maker.made))
        # note the settings now, because a further incident, which restores them, may come before
        # this rank completes a step
        self._settings.note()
        return "; ".join(each for each in (lost, self._overlaps.reservation()) if each) or None

    def skip(self, batches: int) -> None:
        """
        Make the user's data object leave out its next `batches` batches.
        """
        self._local_state.skip(batches)

    def watch_numbers(self, refuse: Callable[[float], bool]) -> bool:
        """
        Begin to note the numbers of each step: its losses and the norm of its gradients. Return
        whether the gradients carry a refusal of the update to all ranks. A rank that refuses a loss
        makes its gradients NaN, and the all-reduces spread the NaN.

        The result is True under three conditions. The losses are on the CPU, so the losses are
        known before the backward pass. No `GradScaler` is in use, which would take NaN for an
        overflow. Every rank has the whole model, so the NaN reaches every rank.
        """
        maker = self._maker
        step_numbers.watch.begin(refuse, lambda: maker.made)
        made = maker.made
        return (
            maker.lasting
            and maker.devices.kind == "cpu"
            and made is not None
            and step_numbers.scaler_of(made) is None
        )

    def updated(self) -> Callable[[], None] | None:
        """
        If the optimizer is a `ReplicaOptimizer`, exchange the parameters with other ranks: each
        rank has updated only some of the parameters. Called when the update window has closed.

        Return the function `exchanged`, as the method `exchange` does.
        """
        made = self._maker.made
        if made is not None and isinstance(made.optimizer, ReplicaOptimizer):
            made.optimizer.share_out()
        return self.exchange()

    def exchange(self) -> Callable[[], None] | None:
        """
        If an exchange of parameters has begun, return the function to call when the device has
        carried it out and nothing in it was aborted. Return None if no exchange has begun.
        """
        made = self._maker.made
        if made is None or not isinstance(made.optimizer, ReplicaOptimizer):
            return None
        return made.optimizer.exchanged if made.optimizer.exchanging else None

    def unkept(self) -> dict[str, str]:
        """
        Return the attributes of modules and the global generators that have changed since the last
        call and are not kept, each with a sentence for the user. Called at the end of a step.
        """
        return {**self._local_state.attributes.unkept(), **self._generators.moved()}

    # ------------------------------------------------------------ groups and wrappers

    def clear(self) -> None:
        """
        Undo the changes of an unfinished step, because this rank may have to give its state to
        another rank. Undo the changes of parameters by an unfinished function that was called after
        a step, if there is a copy. Drop the wrappers and all references to the process groups.
        """
        self._wait_for_readers()
        if self._guard is not None:
            self._guard.settle()
            self._guard = None
        self._wrappers.drop()
        step_numbers.watch.forget()
        self._trained.put_back()  # restore `requires_grad` now, because the next wrapper reads it
        self._contributions.forget()
        self._local_state.rewind()
        self._settings.put_back()
        self._detach()

    def rebuild(self) -> Any:  # Any: the user's own objects
        """
        Let the maker build the wrapper, or all of the user's objects, over the present process
        groups. Return the built objects.

        The built objects have the same content as before, and reduce gradients in the same order.
        `rollback` raises `StateChanged` if the parameters are not those that were compared with
        other ranks.
        """
        self._wait_for_readers()
        self._wrappers.drop()
        if self._passing():
            self._detach()
        built = self._maker.build(self._kept)
        if not self._maker.lasting and self._maker.made is not None:
            self._watch(self._maker.made)
            present = self._maker.contents(self._kept)
            for shard, kept in self._kept.items():
                content = given(kept.meta(), kept.tensors, ())
                refuse_changed(content, present[shard], new_keys=True)
        self._kept = {}
        # do not count the change of all buffers by DDP's constructor as a change by a forward pass
        self._local_state.running.rest()
        self._local_state.attributes.begin()
        self._unchanged.begin(self._reading)
        return built

    def _reading(self, shard: str) -> Callable[[], str]:
        tensors = self.content(shard).tensors
        return partial(model_part, tensors, self._local_state.running.own(tensors))

    def _wait_for_readers(self) -> None:
        """
        Wait until no other thread reads the state, because it may change from now on.

        Raises `StateChanged` if the last `rebuild` has changed the parameters.
        """
        self.backups.wait()
        self._unchanged.wait()

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
        Return whether the user's objects exist now and must be dropped with the process groups.
        """
        return not self._maker.lasting and self._maker.made is not None

    # ------------------------------------------------------------ the shards

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold the shard.

        Raises `UsageError` if the user's objects were made for another rank or world size.
        """
        self._maker.learn(rank, world, self._local_state.learn)
        return [
            ShardCopies(shard=shard, ranks=holders or tuple(range(world)))
            for shard, holders in self._maker.shards().items()
        ]

    def column(self) -> Holders:
        """
        Return the ranks that compute with the same copy of the model as this rank. Call `shards`
        first.
        """
        return self._maker.column

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
        Return the content of the shard in the form in which it is sent to another rank.
        """
        payload = self.content(shard).payload()
        if not self._has_modes(shard):
            return payload
        return replace(payload, buffers=(*payload.buffers, *self._local_state.modes.give()))

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Reserve memory for a shard with the packed description `meta`. Return writable buffers for
        the content of the shard.

        The buffers are the memory of this process's own tensors where these tensors fit. Other
        buffers are new memory, for example for optimizer state that this process does not have yet.
        """
        self._refuse_other(shard)
        self._wait_for_readers()
        awaited = self._awaited.setdefault(shard, Awaited())
        room = awaited.make(meta, self._maker.room(shard, meta))
        return [*room, *self._local_state.modes.take()] if self._has_modes(shard) else room

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Put the received content of a shard into use. Called when all buffers that the method `take`
        returned have been filled.
        """
        self._refuse_other(shard)
        tensors = self._awaited.setdefault(shard, Awaited()).filled(shard, meta)
        self._settle(shard, meta, tensors)
        if self._has_modes(shard):
            self._local_state.modes.taken()

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the content of the shard into files under `directory`. Return the names of the files.
        """
        from tft_pytorch.checkpoints import write  # imported here, because this import takes 1 s

        content = self.content(shard)
        return write(directory, shard, content.meta(), self._maker.written(shard, content))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        Copy the content of the shard into host memory. Return a function that writes the copy into
        a directory later.
        """
        from tft_pytorch.checkpoints import stage

        content = self.content(shard)
        return stage(shard, content.meta(), self._maker.written(shard, content))

    def load(self, directory: Path, shard: str) -> None:
        """
        Load the content of a shard that the method `save` wrote under `directory`.
        """
        from tft_pytorch.checkpoints import load

        self._refuse_other(shard)
        self._wait_for_readers()
        found = load(directory, shard, lambda meta: self._maker.room(shard, meta))
        self._settle_exactly(shard, *found, new_keys=True)
        self._local_state.modes.forget()

    def beside(self, shard: str) -> bytes:
        """
        Return that state of the shard which is not in the user's objects, packed.

        This state is the order in which DDP reduces gradients. Raises `OrderRefused` if the user's
        objects do not have the whole shard now.
        """
        self._refuse_other(shard)
        return self._maker.beside(shard)

    def replaced(self, shard: str, beside: bytes) -> None:
        """
        Note that the script itself has loaded the content of the shard into the user's objects.
        `beside` is the result of the method `beside` when the shard was saved.

        When the last shard was loaded, raises `OrderRefused` if 16-bit parameters differ from their
        rounded masters (32-bit copies). Then the script has not loaded the masters.
        """
        self._refuse_other(shard)
        self._forget()
        self._local_state.modes.forget()
        self._maker.replaced(shard, beside)

    # ------------------------------------------------------------ copies of earlier steps

    def in_use(self) -> dict[str, ShardInUse]:
        """
        Return the present content of all shards of this rank, by name, for a copy in host memory.
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
        Restore the state at the end of `step` from its copy in host memory. Raises `OrderRefused`
        if there is no such copy, or if the copy does not fit the user's objects.
        """
        settle = partial(self._settle_exactly, new_keys=False)
        self.backups.put_back(step, self._maker.shards(), self._maker.room, settle)
        self._local_state.statistics.fetched(foreign=False)
        self._local_state.modes.forget()

    def _settle_exactly(
        self, shard: str, meta: bytes, tensors: Mapping[str, Tensor], *, new_keys: bool
    ) -> None:
        """
        Put content that comes from no other rank into use. Raises `OrderRefused` if an object does
        not have the content afterwards. No comparison with other ranks would find that, because all
        ranks do the same.
        """
        made = self._maker.made
        if not self._maker.lasting or made is None:
            self._settle(shard, meta, tensors)  # `rebuild` puts the content into the objects later
            return
        loading = {name for name, each in others_of(made).items() if not set_directly(each)}
        content = given(meta, tensors, loading)
        self._settle(shard, meta, tensors)
        refuse_changed(content, self.content(shard), new_keys=new_keys)

    def _settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> None:
        content = self._maker.settle(shard, meta, tensors)
        self._forget()
        if content is not None:
            if self._passing():
                self._detach()
            known = {**self._kept, shard: content}
            # keep the order of the shards, because the first shard has the settings of the
            # parameter groups
            self._kept = {name: known[name] for name in self._maker.shards() if name in known}

    def _forget(self) -> None:
        self._unchanged.forget()
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
        Return a digest of each part of a shard, by the name of the part. The holders of the shard
        compare these digests.
        """
        # leave out the modes of the modules, because one rank may run an evaluation for all ranks
        content = self.content(shard)
        parts = shard_parts(content.payload(), self._local_state.running.own(content.tensors))
        self._unchanged.compared(shard, parts.get("model", ""))
        return parts

    def slices(self, shard: str) -> SliceContent:
        """
        Return that content of a shard which is equal on all holders of the shard. The holders
        compare this content while the job trains.
        """
        content = self.content(shard)
        own = self._local_state.running.own(content.tensors)
        return slice_content(replace(content, layouts=None).meta(), content.tensors, own)

    def contribution(self) -> int | None:
        """
        Return a digest of what this rank alone contributed to the gradients of the last step.
        Return None if the contribution is not known.
        """
        return self._contributions.digest()

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters` (with the module buffers), `optimizer` (this rank's part of the
        optimizer state), `scheduler`, the names of the user's other objects, and the keys of
        `RankLocalState.digests`.
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
        Return whether the modes of the modules (training or evaluation) are sent together with this
        shard.
        """
        return self._maker.lasting and shard == next(iter(self._maker.shards()))

    def _refuse_other(self, shard: str) -> None:
        known = self._maker.shards()
        if shard not in known:
            raise OrderRefused(
                f"this rank has no shard {shard!r}; the shards of this rank are {list(known)}"
            )


def others_of(made: Made) -> dict[str, Any]:  # Any: the user's own objects may have any type
    """
    Return the scheduler, if there is one, and the user's other objects, by name.
    """
    scheduler = {} if made.scheduler is None else {"scheduler": made.scheduler}
    return {**scheduler, **made.others}
