"""
Training state that can only be made where the groups are: models sharded by FSDP2, parallelized over a
device mesh, cut into pipeline stages. The user's factory makes them, at the start and anew after every
incident; what this rank held is kept apart from the groups meanwhile and put into what was made.
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
from tft.hooks import Buffer, Made, ShardPayload
from tft.protocol.codec import pack
from tft.protocol.messages import ShardCopies
from tft_pytorch import meshes
from tft_pytorch.adopted import check_plain
from tft_pytorch.buckets import Wrappers
from tft_pytorch.compared import shard_parts
from tft_pytorch.held import Held, Parts, room
from tft_pytorch.memory import Awaited, readable
from tft_pytorch.noted import Settings
from tft_pytorch.private import Private
from tft_pytorch.rehearsal import Rehearsal, refuse_unmovable
from tft_pytorch.state import digest
from tft_pytorch.trained import Trained

Make = Callable[[], Made]

_PARTS = frozenset({"make", "data", "rng"})


def adopt_make(
    parts: Mapping[str, Any],  # Any: the user's own objects
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
) -> "Maker":
    """
    Take charge of the factory that makes the user's objects; `UsageError` for what cannot be handled.
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
    What `session.adopt(make=...)` took charge of.
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
        """By shard, while nothing is made."""
        self._tried: dict[str, Held] = {}
        """What the trial has made: of the right form, its content means nothing."""
        self._buffers: list[str] = []
        """The names of the model's buffers in a shard."""
        self._modes = ""
        """A digest of what the modes were, while nothing is made; empty where that is not known."""
        self._cuda = False
        self._awaited = Awaited()
        self._coming: dict[str, Held] = {}
        """By shard, while its content has not come."""
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
        Whether gradients are summed between CUDA devices.
        """
        return self._cuda

    # ------------------------------------------------------------ between steps

    def capture(self, *, closing: bool = False) -> bytes:
        """
        The private state, at an edge of an update window. Raises `UsageError` where the state could not be
        moved in an incident.
        """
        if closing:
            self._trained.closing()  # first: what the wrappers note counts the trained parameters
            self._wrappers.note()
            self._rehearsal.closing()
            self._settings.forget()
        return self._private.capture(closing=closing)

    def end_step(self, *, tail: bool = True) -> bytes | None:
        """
        The step has ended: note what the next one may set anew. The private state where that is another now.
        """
        self._settings.note()
        return self._private.end_step(tail=tail)

    def set_aside(self) -> Callable[[], None]:
        """
        What puts generators and modes back to what they are now.
        """
        return self._private.set_aside()

    def rollback(self, private: bytes) -> None:
        """
        Put a private state back, and what is left of the gradients.
        """
        self._private.rollback(private)

    def skip(self, batches: int) -> None:
        """
        Leave the next batches out.
        """
        self._private.skip(batches)

    def updated(self) -> None:
        """
        The update window has closed: where the optimizer is cut into shares, every rank gets what
        others have computed of the step.
        """
        if self._parts is not None:
            self._parts.share_out()

    # ------------------------------------------------------------ groups

    def clear(self) -> None:
        """
        Keep what this rank has at the end of the last complete step, and let go of all that refers to the
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
        Make everything anew for the groups of now, and put in what was held.
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
        Those of this rank, with all who hold them.
        """
        if not self._shards:
            self._shards = self._learn(rank, world)
        return [ShardCopies(shard=shard, ranks=ranks) for shard, ranks in self._shards.items()]

    def give(self, shard: str) -> ShardPayload:
        """
        The shard, to be moved.
        """
        held = self._state(shard)
        return ShardPayload(
            meta=held.meta(),
            buffers=tuple(readable(name, tensor) for name, tensor in held.tensors.items()),
        )

    def take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Room for the shard.
        """
        held = room(meta, self._form(shard))
        self._coming = {shard: held}
        return self._awaited.make(meta, held.tensors)

    def taken(self, shard: str, meta: bytes) -> None:
        """
        The shard is whole: it is what this rank has.
        """
        self._awaited.filled(shard, meta)
        self._adopt(shard, self._coming.pop(shard))

    def save(self, directory: Path, shard: str) -> list[str]:
        """
        Write the shard; the names of its files.
        """
        from tft_pytorch.checkpoints import save_held  # late: a second of imports, see preload.py

        return save_held(directory, shard, self._state(shard))

    def stage(self, shard: str) -> Callable[[Path], list[str]]:
        """
        A copy of the shard, which can be written later.
        """
        from tft_pytorch.checkpoints import stage_held

        return stage_held(shard, self._state(shard))

    def load(self, directory: Path, shard: str) -> None:
        """
        Read what `save` wrote.
        """
        from tft_pytorch.checkpoints import load_held

        self._adopt(shard, load_held(directory, shard, self._form(shard)))

    def generators(self) -> dict[str, str]:
        """
        A digest of each generator that is kept, by name.
        """
        return self._private.generators()

    def compare(self, shard: str) -> dict[str, str]:
        """
        Digests by part, to be compared with those of the others who hold the shard.
        """
        payload = self.give(shard)
        # a process that has made nothing yet does not know which of its buffers move: others do
        own = {**dict.fromkeys(self._buffers, False), **self._private.running.own(payload)}
        return shard_parts(payload, own)

    def digests(self) -> dict[str, str]:
        """
        Of this rank's part of the state: `parameters`, `optimizer`, `scheduler` and the others, and what
        is private.
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
        Make everything once over groups that send nothing: that shows who has which part of what. Not
        what is in it, where parts are sent around.
        """
        with _pretended(rank, world), _undisturbed():
            made = self._make()
            parts = Parts(made)  # which refuses what is no Made
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
    Free what nobody refers to but modules to their hooks, and these to them: a group that is freed any
    later is torn down beside the new one.
    """
    meshes.forget()
    gc.collect()


@contextmanager
def _pretended(rank: int, world: int) -> Iterator[None]:
    """
    A default group that completes every collective at once and moves nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend, too

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """
    Whatever is drawn or seeded meanwhile, torch's generator goes on from where it was.
    """
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)
