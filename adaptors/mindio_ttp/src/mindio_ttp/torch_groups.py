"""
The parts that a program on torch.distributed needs to form its process groups again after a repair.

These are names of groups that are equal in survivors and replacements, and a store that does not
end with any rank.

Sources: `_process_group_name`, `launch_tcp_store_client` and `launch_tcp_store_server` of MindIO's
`ttp_decorator.py` (lines 505 to 556 at mind-cluster 22bb3d98). This module never imports torch on
behalf of a program that has not imported it.
"""

import hashlib
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from mindio_ttp import environment

STORE_LIMIT = timedelta(seconds=30)
"""Time limit for the answer of a hub's store: the hub may have to import torch first."""


class GroupNames:
    """
    The names that `torch.distributed` gives to process groups, each with the repair in it.

    A store keeps the keys of a group that is gone. Under a new name no rank finds these keys.
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
        Name groups after this repair from now on, and start their count again.

        A replacement has formed fewer groups than the survivors.
        """
        self._repair, self._count = repair, 0
        self.install()

    def name(self, ranks: Sequence[int], use_hashed_name: bool) -> str:
        """
        Return the name of the next group of `ranks`; without ranks, the name of the default group.

        `use_hashed_name`: only these ranks form the group, so that other ranks do not count it.
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
    The job's own store for `init_process_group`. A hub's process serves it, and it outlives every
    rank.
    """

    def __init__(self) -> None:
        self._used = False
        self._hub = ("", 0)
        """The address of the hub whose store `_client` is connected to."""
        self._client: Any = None

    def use(self, host: str, port: int) -> None:
        """
        Set `env://` to the store of the hub at this address.
        """
        self._used = True
        environment.meet_at(host, port)

    def begin(self, repair: str, host: str, port: int) -> None:
        """
        Make the groups of a repair meet in a store that is empty for all ranks.

        They meet below a prefix of the repair, whatever the name of the default group is. The store
        is that of the hub at this address, or the launcher's.
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


def client(host: str, port: int) -> Any:  # Any: as torch has it
    """
    Return a client of the store at this address. Raises `RuntimeError` where no store answers in
    time.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_LIMIT)


def connect(host: str, port: int) -> None:
    """
    Give the default process group the store at this address. Groups formed from now on meet there.
    """
    torch = _c10d()
    if torch is None or not torch.is_initialized():
        return
    _meet_in(torch, "tft", client(host, port))


def open_store(host: str) -> Any:  # Any: a TCPStore; only the hub's process imports torch
    """
    Serve a store at `host` only, at a free port, for as long as the caller keeps the result.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((host, 0), backlog=socket.SOMAXCONN)
    port = int(listener.getsockname()[1])
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def _root(store: Any) -> Any:  # Any: as torch has it
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _meet_in(torch: Any, prefix: str, store: Any) -> None:  # Any: as torch has it
    """
    Make groups that are formed from now on meet below `prefix` in this store.
    """
    from torch._C._distributed_c10d import PrefixStore

    group = torch._get_default_group()
    backend, _ = torch._world.pg_map[group]
    torch._world.pg_map[group] = (backend, PrefixStore(prefix, store))


def _hashed(text: str) -> str:
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _c10d() -> Any:  # Any: the module's inner names have no types
    return sys.modules.get("torch.distributed.distributed_c10d")
