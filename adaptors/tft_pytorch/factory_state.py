"""
Training state that can only be made when the process groups exist: models that are sharded by
FSDP2, parallelized over a device mesh, or cut into pipeline stages.

The user's factory makes the objects at the start, and anew after every incident. In between, this
rank's state is kept apart from the groups. It is then put into the new objects.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tft.errors import OrderRefused, UsageError
from tft.spi import Buffer, Made, ShardCopies, ShardPayload, pack
from tft_pytorch import meshes
from tft_pytorch.buckets import Wrappers
from tft_pytorch.memory import Awaited, readable
from tft_pytorch.noted import Settings
from tft_pytorch.part_digests import shard_parts
from tft_pytorch.rank_local_state import Private
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.sharded_state import Held, Parts, room
from tft_pytorch.state import digest
from tft_pytorch.trained import Trained
from tft_pytorch.training_state import check_plain

Make = Callable[[], Made]

_PARTS = frozenset({"make", "data", "rng"})


def adopt_make(
    parts: Mapping[str, Any],  # Any: the user's own objects
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
) -> "Maker":
    """
    Take charge of the factory that makes the user's objects, and return its `Maker`.

    `contributing` is the function that `tft_watch` received. Raises `UsageError` for arguments that
    the adaptor cannot handle.
    """
    _check_make(parts, wrap)
    return Maker(parts["make"], parts.get("data"), parts.get("rng") or ("torch",), contributing)


def _check_make(
    parts: Mapping[str, Any], wrap: Callable[[], Any] | None
) -> None:  # Any: the user's own objects
    unknown = sorted(parts.keys() - _PARTS)
    if unknown or wrap is not None:
        raise UsageError(
            f"session.adopt was given make and {', '.join([*unknown, *(['wrap'] if wrap else [])])}: "
            "what make returns has the model, wrapped already, the optimizer, the scheduler and the others"
        )
    if not callable(parts["make"]):
        raise UsageError(f"make must be a function, not a {type(parts['make']).__name__}")
    check_plain(parts)


class Maker:
    """
    The training state whose factory `session.adopt(make=...)` took charge of.
    """

    def __init__(
        self,
        make: Make,
        data: Any,  # Any: the user's own object
        rngs: Sequence[str],
        contributing: Callable[[], None] | None,
    ) -> None:
        self._make = make
        self._contributing = contributing
        self._private = Private(nn.Module(), data, rngs)
        self._wrappers = Wrappers(contributing)
        self._parts: Parts | None = None
        self._shards: dict[str, tuple[int, ...]] = {}
        self._held: dict[str, Held] = {}
        """The state by shard, while the objects do not exist."""
        self._tried: dict[str, Held] = {}
        """The state by shard that the trial in `_learn` has made: names, types and shapes are
        right, but there is no content."""
        self._buffers: list[str] = []
        """The names (`model.…`) of the model's buffers."""
        self._modes = ""
        """A digest of the last modes, while the objects do not exist; empty if it is not known."""
        self._cuda = False
        self._awaited = Awaited()
        self._coming: dict[str, Held] = {}
        """The shard for which room was made, until its content has arrived."""
        self._watch: RemovableHandle | None = None
        self._rehearsal = Rehearsal(self._describe)
        self._settings = Settings()
        self._trained = Trained()
        pack(self._private.digestible())

    def _describe(self) -> None:
        for held in self._all().values():
            refuse_unmovable(held.tensors)
            held.meta()

    @property
    def on_cuda(self) -> bool:
        """
        Whether gradients are reduced between CUDA devices.
        """
        return self._cuda

    # ------------------------------------------------------------ between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        Return the rank-local state, at an edge of an update window.

        Raises `UsageError` if the state could not be moved in an incident.
        """
        if closing:
            self._trained.closing()  # first: the wrappers count the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._private.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        Note, at the end of a step, the settings that the next step may change.

        Return the rank-local state anew if it has changed since the update window closed, else
        None. `tail`: the tail of the step is over too.
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
        """
        self._private.rollback(private)

    def skip(self, batches: int) -> None:
        """
        Leave out the next `batches` batches.
        """
        self._private.skip(batches)

    def updated(self) -> None:
        """
        Give every rank the parameters that other ranks have updated, if the optimizer is cut into
        shares. Called when the update window has closed.
        """
        if self._parts is not None:
            self._parts.share_out()

    # ------------------------------------------------------------ groups

    def clear(self) -> None:
        """
        Keep this rank's state of the end of the last complete step, and drop all references to the
        groups.
        """
        self._wrappers.drop()
        if self._watch is not None:
            self._watch.remove()
        self._private.rewind()
        self._settings.put_back()
        self._held = self._all()
        self._parts = self._watch = None
        self._settings.watch([], None)
        self._private.modes.watch()
        self._private.running.let_go()
        self._private.extra.let_go()
        self._rehearsal.let_go()
        self._trained.let_go()
        self._private.gradients.watch(())
        _let_go()

    def rebuild(self) -> Made:
        """
        Call the user's factory for the present groups, and put the kept state into the new objects.
        Return these objects.
        """
        held = [*self._all().values()]
        with _undisturbed():
            made = self._make()
        parts = Parts(made)
        if held:
            parts.fill(held)
            self._wrappers.restore(parts.layouts(held))
        parts.share_out()
        self._wrappers.settle(made.model)
        if self._contributing is not None:
            say = self._contributing
            self._watch = made.model.register_forward_hook(lambda *_: say())
        self._trained.watch(parts.parameters)
        self._private.gradients.watch(parts.parameters.values())
        self._private.running.watch(made.model)
        self._private.extra.watch(made.model)
        self._private.modes.watch(
            made.model, *(each for each in made.others.values() if isinstance(each, nn.Module))
        )
        scheduler = {} if made.scheduler is None else {"scheduler": made.scheduler}
        self._rehearsal.watch(made.optimizer, {**scheduler, **made.others})
        self._settings.watch([made.optimizer], made.scheduler)
        self._parts, self._held = parts, {}
        return made

    # ------------------------------------------------------------ the shard

    def shards(self, rank: int, world: int) -> list[ShardCopies]:
        """
        Return the shards of this rank, each with all ranks that hold it.
        """
        if not self._shards:
            self._shards = self._learn(rank, world)
        return [ShardCopies(shard=shard, ranks=ranks) for shard, ranks in self._shards.items()]

    def give(self, shard: str) -> ShardPayload:
        """
        Return the shard in the form in which it is moved.
        """
        held = self._state(shard)
        return ShardPayload(
            meta=held.meta(),
            buffers=tuple(readable(name, tensor) for name, tensor in held.tensors.items()),
        )

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for a shard with the description `meta`. Return the writable buffers.
        """
        held = room(meta, self._form(shard))
        self._coming = {shard: held}
        return self._awaited.make(meta, held.tensors)

    def taken(self, shard: str, meta: bytes) -> None:
        """
        Use the shard whose buffers have all arrived.
        """
        self._awaited.filled(shard, meta)
        self._adopt(shard, self._coming.pop(shard))

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the shard under `directory`. Return the names of the written files.
        """
        from tft_pytorch.checkpoints import save_held  # late import: 1 s, see preload.py

        return save_held(directory, shard, self._state(shard))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        Copy the shard. Return a function that writes the copy later.
        """
        from tft_pytorch.checkpoints import stage_held

        return stage_held(shard, self._state(shard))

    def load(self, directory: Path, shard: str) -> None:
        """
        Load a shard that `save` wrote.
        """
        from tft_pytorch.checkpoints import load_held

        self._adopt(shard, load_held(directory, shard, self._form(shard)))

    def generators(self) -> dict[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by name.
        """
        return self._private.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Return the digests of a shard by part, for comparison with the other holders of the shard.
        """
        payload = self.give(shard)
        # A process that has made nothing yet does not know which of its buffers the forward pass
        # changes. The other holders know.
        own = {**dict.fromkeys(self._buffers, False), **self._private.running.own(payload)}
        return shard_parts(payload, own)

    def digests(self) -> dict[str, str]:
        """
        Return digests of all parts of this rank's state.

        The keys are `parameters`, `optimizer`, `scheduler`, the names of the others, and those of
        the rank-local state.
        """
        held = [self._state(shard) for shard in self._shards]

        def named(prefix: str) -> dict[str, Tensor]:
            return {
                n: t for each in held for n, t in each.tensors.items() if n.startswith(f"{prefix}.")
            }

        others = {name: None for each in held for name in each.others}
        return {
            "parameters": digest(self._private.extra.noted()[0], named("model")),
            "optimizer": digest([each.optimizer for each in held], named("optim")),
            "scheduler": digest(None, {}),
            **{
                name: digest([each.others.get(name) for each in held], named(name))
                for name in others
            },
            **self._private.digests(),
        }

    def _adopt(self, shard: str, held: Held) -> None:
        self._private.forget()
        known = {**self._all(), shard: held}
        self._held = {name: known[name] for name in self._shards if name in known}
        self._parts = None

    def _all(self) -> dict[str, Held]:
        if self._parts is None:
            return self._held
        return dict(zip(self._shards, self._parts.held(self._wrappers.layouts()), strict=True))

    def _state(self, shard: str) -> Held:
        self._refuse_other(shard)
        held = self._all()
        if shard not in held:
            raise OrderRefused("nothing has been made yet that could be given away")
        return held[shard]

    def _form(self, shard: str) -> Held:
        self._refuse_other(shard)
        return self._tried[shard]

    def _refuse_other(self, shard: str) -> None:
        if shard not in self._shards:
            raise OrderRefused(f"this rank has the shards {list(self._shards)}, and no {shard!r}")

    def _learn(self, rank: int, world: int) -> dict[str, tuple[int, ...]]:
        """
        Make the objects once, over groups that send nothing. Return the holders of each shard.

        This trial shows which ranks hold which part of each tensor. It does not show the content:
        parts that the factory sends between ranks do not arrive.
        """
        with _pretended(rank, world), _undisturbed():
            made = self._make()
            parts = Parts(made)  # refuses a result that is no Made
            self._private.running.learn(made.model)
            shards = parts.shards()
            held = dict(zip(shards, parts.held(), strict=True))
            self._buffers = [f"model.{name}" for name in parts.buffers]
            self._cuda = any(t.is_cuda for each in held.values() for t in each.tensors.values())
            self._tried = {shard: each.bare() for shard, each in held.items()}
            del held, parts, made
            _let_go()
        return shards


def _let_go() -> None:
    """
    Free the objects that only refer to each other, such as modules and their hooks.

    A group that is freed any later is torn down when the new group already exists.
    """
    meshes.forget()
    gc.collect()


@contextmanager
def _pretended(rank: int, world: int) -> Iterator[None]:
    """
    Provide a default group that completes every collective at once and sends nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend too

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """
    Restore torch's generator at the end, however it was seeded or used in between.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
