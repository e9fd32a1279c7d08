"""
Keeps the training state of objects that can only be made when the process groups exist
(`session.adopt(make=...)`). Examples are models that are sharded by FSDP2, parallelized over a
device mesh, or cut into pipeline stages.

The user's factory `make` makes the objects at the start, and again after every incident. Between
two calls of `make`, this module keeps the tensors of this rank without references to process
groups. After a new call of `make`, this module puts the tensors into the new objects.
"""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tft.errors import OrderRefused, UsageError
from tft.spi import Made
from tft_pytorch import meshes
from tft_pytorch.adopted_maker import check_plain
from tft_pytorch.buckets import Wrappers
from tft_pytorch.device import Devices, devices_of, select, undisturbed
from tft_pytorch.shard_content import ShardContent
from tft_pytorch.sharded_state import Parts, filled, room, written
from tft_pytorch.state_store import StateStore
from tft_pytorch.tensor_holders import Holders
from tft_pytorch.trees import Plain
from tft_pytorch.waiting_time import waiting_time

Make = Callable[[], Made]

_PARTS = frozenset({"make", "data", "rng"})


def adopt_make(
    parts: Mapping[str, Any],  # Any: the user's own objects may have any type
    wrap: Callable[[], Any] | None,
    contributing: Callable[[], None] | None = None,
    *,
    attributes: bool = False,
) -> StateStore:
    """
    Take charge of the factory function in `parts`, which makes the user's objects. Return the
    training state.

    `contributing` is called at the end of each forward pass, when this rank is about to contribute
    to the all-reduces of the step (see the hook `tft_watch`). If `attributes` is True, plain
    attributes of modules are kept. Raises `UsageError` for arguments that the adaptor cannot handle.
    """
    _check_make(parts, wrap)
    maker = FactoryMaker(parts["make"], contributing)
    rngs = parts.get("rng") or ("torch",)
    return StateStore(maker, parts.get("data"), rngs, attributes=attributes)


def _check_make(
    parts: Mapping[str, Any], wrap: Callable[[], Any] | None
) -> None:  # Any: the user's own objects may have any type
    unknown = sorted(parts.keys() - _PARTS)
    if unknown or wrap is not None:
        raise UsageError(
            "session.adopt was given make and "
            f"{', '.join([*unknown, *(['wrap'] if wrap else [])])}: make returns the wrapped "
            "model, the optimizer, the scheduler and the others"
        )
    if not callable(parts["make"]):
        raise UsageError(
            "the argument make of session.adopt must be a function, not a "
            f"{type(parts['make']).__name__}"
        )
    check_plain(parts)


class FactoryMaker:
    """
    Calls the user's factory, and gives access to the objects that the factory has made. Implements
    the protocol `tft_pytorch.state_store.Maker`.
    """

    lasting = False

    def __init__(self, make: Make, contributing: Callable[[], None] | None) -> None:
        self._make = make
        self._contributing = contributing
        self.wrappers = Wrappers(contributing)
        self.devices = Devices()
        self._parts: Parts | None = None
        self.column: Holders = ()
        self._shards: dict[str, Holders] = {}
        self._tried: dict[str, ShardContent] = {}
        """The content of each shard as the trial call of the factory in `learn` has shown it. Its
        tensors have the right names, types and shapes, but no memory."""
        self._watch: RemovableHandle | None = None

    @property
    def made(self) -> Made | None:
        return None if self._parts is None else self._parts.made

    # ------------------------------------------------------------ the shards of this rank

    def shards(self) -> Mapping[str, Holders]:
        return self._shards

    def learn(self, rank: int, world: int, learned: Callable[[nn.Module], None]) -> None:
        """
        Call the user's factory once as a trial, over process groups that send nothing. Then free
        the objects that the factory has made.

        The trial shows which ranks hold which part of each tensor. The content of the tensors is
        wrong, because nothing that the factory sends between ranks arrives.
        """
        if self._shards:
            return
        with _pretended(rank, world), undisturbed():
            made = self._make()
            # `Parts` raises UsageError if the user's function `make` has not returned a Made
            parts = Parts(made)
            learned(made.model)
            shards, self.column = parts.shards(), parts.column
            held = dict(zip(shards, parts.held(), strict=True))
            self.devices = devices_of(chain(made.model.parameters(), made.model.buffers()))
            self._tried = {shard: each.bare() for shard, each in held.items()}
            del held, parts, made
            _free()
        self._shards = shards

    def contents(self, shards: Collection[str]) -> dict[str, ShardContent]:
        if self._parts is None:
            raise OrderRefused(
                "the function make of session.adopt has not been called yet, so this rank has no "
                "state that it could send to another rank"
            )
        # `Parts.held` returns the content of all shards, in the order of `self._shards`
        held = self._parts.held(self.wrappers.layouts())
        found = dict(zip(self._shards, held, strict=True))
        return {shard: found[shard] for shard in shards}

    def written(self, shard: str, content: ShardContent) -> Mapping[str, Any]:
        return written(content)

    def weights(self, contents: Sequence[ShardContent]) -> Mapping[str, Tensor]:
        return {n: t for each in contents for n, t in each.named("model").items()}

    def others(self, contents: Sequence[ShardContent]) -> Mapping[str, Plain]:
        names = {name: None for each in contents for name in each.others}
        return {name: [each.others.get(name) for each in contents] for name in names}

    # ------------------------------------------------------------ changes of the content

    def room(self, shard: str, meta: bytes) -> Mapping[str, Tensor]:
        return room(meta, self._tried[shard]).tensors

    def settle(self, shard: str, meta: bytes, tensors: Mapping[str, Tensor]) -> ShardContent:
        return filled(meta, tensors)

    def beside(self, shard: str) -> bytes:
        raise UsageError("with make=, tft writes the checkpoint itself: do not pass save and load")

    def replaced(self, shard: str, beside: bytes) -> None:
        raise UsageError("with make=, tft writes the checkpoint itself: do not pass save and load")

    # ------------------------------------------------------------ groups

    def release(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._parts = self._watch = None
        _free()

    def build(self, kept: Mapping[str, ShardContent]) -> Made:
        """
        Call the user's factory for the present groups. Put `kept`, the content of this rank's
        shards, into the new objects. Return the new objects.
        """
        with undisturbed():
            made = self._make()
        parts = Parts(made)
        # The function may use streams of its own. Their work must be complete before the content of
        # the shards is copied into the model.
        self.devices.synchronize()
        if kept:
            held = list(kept.values())
            parts.fill(held)
            self.wrappers.restore(parts.layouts(held))
        parts.share_out()
        self.wrappers.settle(made.model)
        if self._contributing is not None:
            say = self._contributing
            self._watch = made.model.register_forward_hook(lambda *_: say())
        waiting_time.watch(made.model)
        self._parts = parts
        return made


def _free() -> None:
    """
    Free objects that refer only to each other, such as modules and their hooks. Also free the
    process groups to which only such objects refer.

    These objects and groups must be freed before new groups are formed. Otherwise an old process
    group could be torn down after the new group is formed.
    """
    meshes.forget()
    gc.collect()


@contextmanager
def _pretended(rank: int, world: int) -> Iterator[None]:
    """
    Provide a default process group within the `with` block. Its collectives complete at once and
    send nothing.
    """
    # importing this module registers torch's backend `fake`
    from torch.testing._internal.distributed.fake_pg import FakeStore

    select()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
