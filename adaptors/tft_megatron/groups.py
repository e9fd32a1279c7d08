"""
Forms Megatron's process groups. At first there are only pretended groups, which send nothing. With
pretended groups a script can build model and optimizer before other ranks have started. Real groups
replace the pretended groups later.

Megatron stores each group in a variable of its module `parallel_state`. The name of the variable is
the role of the group. A new group replaces the old group with the same role (see
`group_references.py`).
"""

import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch.distributed as dist
from tft_pytorch.device import Devices
from tft_pytorch.groups import Groups
from torch.distributed import distributed_c10d

from tft.errors import OrderRefused, UsageError
from tft_megatron.group_references import Place, Role, find_places
from tft_megatron.stray_groups import refuse_kept

_WORLD: Role = "world"
_ALL = "_global_process_group_list"
"""The variable with Megatron's list of all groups. A group without a variable of its own is only in
this list, so its role is its place in the list."""


class Parallel:
    """
    Megatron's process groups in this process. The groups are either pretended groups, which send
    nothing, or real groups.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sizes: Mapping[str, Any] = {}
        self._rank, self._world = 0, 0
        self._pretends = False
        self._places: list[Place] = []
        self._beside: Callable[[], None] = lambda: None
        self._taken: list[ref[dist.ProcessGroup]] = []
        """Weak references to the pretended groups (groups that send nothing) that this class has
        dropped. Such a group still exists if the script refers to it."""
        self._excepthook = sys.excepthook

    @property
    def begun(self) -> bool:
        """
        Return whether `begin` was called.
        """
        return self._world > 0

    @property
    def sizes(self) -> Mapping[str, Any]:  # Any: the sizes have various types
        """
        Return the sizes with which `begin` was called.
        """
        return self._sizes

    @property
    def place(self) -> tuple[int, int]:
        """
        Return the rank and the world size with which `begin` was called.
        """
        return self._rank, self._world

    def begin(self, rank: int, world: int, sizes: Mapping[str, Any]) -> None:
        """
        Create the pretended groups, which send nothing. Raises `UsageError` if the sizes do not
        divide the world size.
        """
        self._rank, self._world, self._sizes = rank, world, sizes
        try:
            self._pretend()
        except (RuntimeError, AssertionError, TypeError) as error:
            self._drop_pretence()
            self._world = 0
            raise UsageError(
                f"Megatron cannot form groups of {world} ranks with these sizes: {error}"
            ) from None

    def remember(self, roots: Mapping[str, object], beside: Callable[[], None]) -> None:
        """
        Find all references to the groups that can be reached from `roots`. From now on these
        references are set to the new groups whenever groups are formed.

        `beside` is a function that drops the references which Megatron keeps outside of `roots`,
        such as in caches. Raises `UsageError` if the script has further references to the groups,
        because tft could not set these to the new groups.
        """
        self._beside = beside
        self._places = find_places(roots, _roles())
        pretended = self._pretended()
        self._drop_pretence()
        try:
            refuse_kept(pretended)
        finally:
            self._pretend()
            self._point()

    def form(
        self, name: str, host: str, port: int, rank: int, world: int, *, devices: Devices
    ) -> None:
        """
        Replace the present groups by real groups. Raises `OrderRefused` if the script still refers
        to a pretended group (a group that sends nothing), which tft cannot replace there.
        """
        self._taken += self._pretended()
        self._drop_pretence()
        try:
            refuse_kept(self._taken)
        except UsageError as kept:
            raise OrderRefused(str(kept)) from None
        self._taken = []

        def more() -> None:
            _initialize(self._sizes)
            self._point()

        self._groups.form(name, host, port, rank, world, devices=devices, more=more)

    def clear(self) -> None:
        """
        Free the real groups, and create pretended groups, which send nothing, in their place.
        """
        if not self.begun or self._pretends:
            return
        self._let_go()
        self._groups.clear()
        self._pretend()
        self._point()

    def _pretend(self) -> None:
        from torch.testing._internal.distributed.fake_pg import (
            FakeStore,
        )  # this import also registers the backend "fake"

        self._excepthook = sys.excepthook
        dist.init_process_group("fake", store=FakeStore(), rank=self._rank, world_size=self._world)
        self._pretends = True
        with _all_pretended():
            _initialize(self._sizes)

    def _pretended(self) -> list[ref[dist.ProcessGroup]]:
        return [ref(group) for group in distributed_c10d._world.pg_map] if self._pretends else []

    def _drop_pretence(self) -> None:
        self._let_go()
        if self._pretends:
            dist.destroy_process_group()
            # remove the wrapper that torch's `init_process_group` puts around `sys.excepthook`
            sys.excepthook = self._excepthook
            self._pretends = False

    def _point(self) -> None:
        roles = _roles()
        for place in self._places:
            place.put(roles[place.role])

    def _let_go(self) -> None:
        """
        Drop all references to the present groups, so that Python frees the groups.
        """
        for place in self._places:
            place.put(None)
        self._beside()
        _forget_groups()
        gc.collect()  # free the reference cycles of modules and their hooks, which refer to groups


def _initialize(sizes: Mapping[str, Any]) -> None:  # Any: the arguments have various types
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(**sizes)


def _roles() -> dict[Role, dist.ProcessGroup]:
    """
    Return the present groups by role.
    """
    from megatron.core import parallel_state

    found: dict[Role, dist.ProcessGroup] = {}
    if dist.group.WORLD is not None:
        found[_WORLD] = dist.group.WORLD
    named = vars(parallel_state)
    for name in sorted(named, key=lambda name: name == _ALL):
        value = named[name]
        if isinstance(value, dist.ProcessGroup):
            found[name] = value
        elif isinstance(value, list):
            found |= {(name, i): g for i, g in enumerate(value) if isinstance(g, dist.ProcessGroup)}
        elif isinstance(value, dict) and not name.startswith("__"):
            found |= {(name, k): g for k, g in value.items() if isinstance(g, dist.ProcessGroup)}
    return found


def _forget_groups() -> None:
    """
    Remove all groups from the variables of Megatron's module `parallel_state`. Megatron's function
    `destroy_model_parallel` leaves some groups there.
    """
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup) or (
            isinstance(value, list) and any(isinstance(g, dist.ProcessGroup) for g in value)
        ):
            setattr(parallel_state, name, None)
        elif isinstance(value, dict) and any(
            isinstance(g, dist.ProcessGroup) for g in value.values()
        ):
            setattr(parallel_state, name, {})


@contextmanager
def _all_pretended() -> Iterator[None]:
    """
    Make Megatron create only pretended groups, which send nothing, while this context is open.

    Without this context, Megatron would create some groups with gloo and some with options for
    NCCL. Creating such groups fails while no other rank is connected.
    """
    from megatron.core import parallel_state

    make: Callable[..., Any] = parallel_state.create_group

    def pretended(*arguments: Any, **named: Any) -> Any:  # Any: Megatron gives mypy no types
        return make(*arguments, **{**named, "backend": "fake", "pg_options": None})

    parallel_state.create_group = pretended
    try:
        yield
    finally:
        parallel_state.create_group = make
