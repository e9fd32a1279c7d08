"""
Serves the rendezvous store of tft. Also connects to the store of torchrun, if torchrun has started
this process.

The rendezvous store runs in a process of its own. No rank hosts the rendezvous store, so the store
survives the loss of any rank.
"""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore  # the class torch.distributed.TCPStore

from tft.errors import AddressTaken, UsageError

_ANSWER = timedelta(minutes=1)
"""The time limit for an answer of torchrun's store. No time is needed for the start of the store,
which runs before the training processes start."""
_PATIENCE = timedelta(hours=1)
"""The time limit for a value that another process stores. This limit is long because the other
process first runs its script up to `tft.init`. `tft run` has the same limit for nodes to join."""


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Serve the rendezvous store at `host` only, until this process ends.

    The function `opened` is called with the port on which the store listens. Raises `AddressTaken`
    if the store cannot listen at `host` and `port`.
    """
    try:
        listener = socket.create_server((host, port), backlog=socket.SOMAXCONN)
    except OSError as error:
        raise AddressTaken(
            f"the rendezvous store cannot listen at {host}:{port}: {error}"
        ) from None
    taken = int(listener.getsockname()[1])
    store = TCPStore(
        host, taken, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    opened(store.port)
    threading.Event().wait()


class TorchrunStore:
    """
    The store of torchrun, as a `tft.spi.LauncherStore`. When torchrun restarts the training
    processes, the store keeps all its keys.

    Every method raises `UsageError` if the store does not answer.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = f"{host}:{port}"
        with self._answering():
            self._store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=_ANSWER
            )

    def keep(self, key: str, words: str) -> str:
        with self._answering():
            return self._store.compare_set(key, "", words).decode()

    def put(self, key: str, words: str) -> None:
        with self._answering():
            self._store.set(key, words)

    def take(self, key: str) -> str:
        with self._answering():
            self._store.set_timeout(_PATIENCE)
            words = self._store.get(key).decode()
            self._store.delete_key(key)
        return words

    @contextmanager
    def _answering(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # torch's store raises no other class of exception
            raise UsageError(
                f"the store that torchrun serves at {self._address} does not answer: {error}"
            ) from None
