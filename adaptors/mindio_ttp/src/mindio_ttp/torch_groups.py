"""
Helps a program that uses torch.distributed to form its process groups again after a repair.

For this, the surviving ranks and the new processes must use the same name for a group. They also
need a rendezvous store that does not end with a rank: the hub, a process beside the agent, serves
it.

Sources: `_process_group_name`, `launch_tcp_store_client` and `launch_tcp_store_server` of MindIO's
`ttp_decorator.py` (lines 505 to 556 at mind-cluster 22bb3d98). In a training process this module
imports torch only if the program has imported torch already.
"""

import hashlib
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindio_ttp import environment

STORE_LIMIT = timedelta(seconds=30)
"""The time limit for an answer of the store that the hub serves. It is long, because the hub may
have to import torch first."""


class GroupNames:
    """
    Gives process groups of `torch.distributed` names that contain the name of the present repair.

    A rendezvous store keeps the keys of groups that no longer exist. A new group with an old name
    would read these keys, so each repair uses new names.
    """

    def __init__(self) -> None:
        self._repair = "0"
        self._count = 0

    def install(self) -> None:
        """
        Replace torch's naming of groups, if this process has imported torch.distributed.
        """
        torch = _c10d()
        if torch is not None:
            torch._process_group_name = self.name

    def begin(self, repair: str) -> None:
        """
        Use the name `repair` in the names of groups from now on, and count groups from 1 again.

        The count must start again on all ranks, because the new process of a replaced rank has
        formed fewer groups than the surviving ranks.
        """
        self._repair, self._count = repair, 0
        self.install()

    def name(self, ranks: Sequence[int], use_hashed_name: bool) -> str:
        """
        Return the name of the next group of `ranks`. Without ranks, return the name of the default
        group.

        Pass `use_hashed_name=True` if only these ranks call `new_group`. The name is then made of
        the ranks and not of a count, because the other ranks do not count this group.
        """
        if use_hashed_name:
            taken = set(_c10d()._world.pg_names.values())
            name = f"{_hashed('_'.join(map(str, ranks)))}_{self._repair}"
            while name in taken:
                name = _hashed(name + "_")
            return name
        if not ranks:
            return f"{self._repair}__"
        self._count += 1
        return f"{self._count}_{self._repair}"


class Store:
    """
    The rendezvous store of the job, for `init_process_group`. The hub serves the store, so it does
    not end with a rank.
    """

    def __init__(self) -> None:
        self._used = False
        self._hub = ("", 0)
        """The address of the hub to whose store `_client` is connected."""
        self._client: Any = None

    def use(self, host: str, port: int) -> None:
        """
        Set the variables of `env://`, so that `init_process_group` uses the store of the hub at
        this address.
        """
        self._used = True
        environment.meet_at(host, port)

    def begin(self, repair: str, host: str, port: int) -> None:
        """
        Make the groups that are formed in the repair `repair` use keys of the store that no earlier
        group has used.

        The keys begin with the name of the repair. The store is that of the hub at this address if
        `use` was called. Otherwise it is the store that the default group uses already.
        """
        if self._used:
            environment.meet_at(host, port)
        torch = _c10d()
        if torch is None or not torch.is_initialized():
            return
        if not self._used:
            root = _root(torch._get_default_store())
        elif self._hub == (host, port):
            root = self._client
        else:
            root = client(host, port)
            self._hub, self._client = (host, port), root
        _meet_in(torch, f"tft-{repair}", root)


def client(host: str, port: int) -> Any:  # Any: torch is imported only at run time
    """
    Connect to the store at this address, and return the client. Raises `RuntimeError` if no store
    answers within `STORE_LIMIT`.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_LIMIT)


def connect(host: str, port: int) -> None:
    """
    Make groups that are formed from now on use the store at this address. Do nothing if there is no
    default process group.
    """
    torch = _c10d()
    if torch is None or not torch.is_initialized():
        return
    _meet_in(torch, "tft", client(host, port))


def open_store(host: str) -> Any:  # Any: a TCPStore, but only the hub imports torch
    """
    Serve a store at a free port of the address `host` only. The store is served for as long as the
    caller keeps the returned object.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _root(store: Any) -> Any:  # Any: torch is imported only at run time
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _meet_in(torch: Any, prefix: str, store: Any) -> None:  # Any: torch is not imported here
    """
    Make groups that are formed from now on use keys with the prefix `prefix` in this store.
    """
    from torch._C._distributed_c10d import PrefixStore

    group = torch._get_default_group()
    backend, _ = torch._world.pg_map[group]
    torch._world.pg_map[group] = (backend, PrefixStore(prefix, store))


def _hashed(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _c10d() -> Any:  # Any: a module whose inner names are untyped
    return sys.modules.get("torch.distributed.distributed_c10d")
