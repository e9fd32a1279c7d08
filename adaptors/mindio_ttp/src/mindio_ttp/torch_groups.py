"""
Helps a program that uses torch.distributed to form its process groups again after a repair.

For this, the surviving processes and the new processes must use the same name for a group. All
processes also need a rendezvous store that does not end with a rank. The hub, a process that the
agent starts, serves this store.

In a training process this module imports torch only if the program has imported torch already.
Sources: `_process_group_name`, `launch_tcp_store_client` and `launch_tcp_store_server` in MindIO's
`ttp_decorator.py` (lines 505 to 556 at commit 22bb3d98 of the repository mind-cluster).
"""

import hashlib
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindio_ttp import environment

STORE_LIMIT = timedelta(seconds=30)
"""The time limit for an answer of the rendezvous store that the hub serves. The limit is long,
because the hub may have to import torch first."""


class GroupNames:
    """
    Gives names to the process groups of `torch.distributed`. Each name contains the name of the
    repair in which the group is formed.

    A rendezvous store keeps the keys of groups that no longer exist. A new group with the name of
    an old group would read the keys of the old group, so each repair uses new names.
    """

    def __init__(self) -> None:
        self._repair = "0"
        self._count = 0

    def install(self) -> None:
        """
        Make torch.distributed use the method `name` to name process groups. Do nothing if this
        process has not imported torch.distributed.
        """
        torch = _c10d()
        if torch is not None:
            torch._process_group_name = self.name

    def begin(self, repair: str) -> None:
        """
        Use the name `repair` of a repair in the names of groups from now on. Also count the groups
        from 1 again.

        The count must start again on all ranks, because the new process of a replaced rank has
        formed fewer groups than the processes of the surviving ranks.
        """
        self._repair, self._count = repair, 0
        self.install()

    def name(self, ranks: Sequence[int], use_hashed_name: bool) -> str:
        """
        Return the name of the next process group of `ranks`. If `ranks` is empty, return the name
        of the default group.

        With `use_hashed_name=True`, only the ranks of the group call `new_group`. The name is then
        made of the ranks and not of a count, because the other ranks do not count this group.
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
    The rendezvous store with which `init_process_group` of torch.distributed forms process groups.
    The hub, a process of tft, serves the store, so that the store does not end with a rank.
    """

    def __init__(self) -> None:
        self._used = False
        """True if `use` was called, so that the program uses the store of a hub from the start."""
        self._hub = ("", 0)
        """The host and port of the hub to whose store `_client` is connected."""
        self._client: Any = None
        """The client of the store. None if there is no connection. Any: a TCPStore of torch."""

    def use(self, host: str, port: int) -> None:
        """
        Make `init_process_group` use the store of the hub at `host` and `port`. To do so, set the
        environment variables that torch.distributed reads for the method `env://`.
        """
        self._used = True
        environment.meet_at(host, port)

    def begin(self, repair: str, host: str, port: int) -> None:
        """
        Make the process groups that are formed in the repair `repair` use keys in the rendezvous
        store that no earlier group has used. The keys begin with the name of the repair.

        If `use` was called, the store is that of the hub at `host` and `port`. Otherwise it is the
        store that the default process group uses already.
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


# Any: a TCPStore, whose class torch defines; torch is imported only later
def client(host: str, port: int) -> Any:
    """
    Connect to the rendezvous store at `host` and `port`, and return the client. Raises
    `RuntimeError` if no store answers within `STORE_LIMIT`.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_LIMIT)


def connect(host: str, port: int) -> None:
    """
    Make the process groups that are formed from now on use the rendezvous store at `host` and
    `port`. Do nothing if there is no default process group.

    Raises `RuntimeError` if no store answers.
    """
    torch = _c10d()
    if torch is None or not torch.is_initialized():
        return
    _meet_in(torch, "tft", client(host, port))


# Any: a TCPStore; only the hub, which serves the store, imports torch
def open_store(host: str) -> Any:
    """
    Serve a rendezvous store at a free port, only on the network address `host`. Return the store.
    It is served for as long as the caller keeps the returned object.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _root(store: Any) -> Any:  # Any: a store of torch, which is imported only at run time
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


# Any: torch and its store; this module does not import torch
def _meet_in(torch: Any, prefix: str, store: Any) -> None:
    """
    Make the process groups that are formed from now on use keys with the prefix `prefix` in
    `store`. `torch` is the module `torch.distributed.distributed_c10d`.
    """
    from torch._C._distributed_c10d import PrefixStore

    group = torch._get_default_group()
    backend, _ = torch._world.pg_map[group]
    torch._world.pg_map[group] = (backend, PrefixStore(prefix, store))


def _hashed(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _c10d() -> Any:  # Any: torch's module, whose inner names have no types
    return sys.modules.get("torch.distributed.distributed_c10d")
