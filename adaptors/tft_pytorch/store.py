"""
The rendezvous store, in a process of its own: no rank hosts it, so none takes it down.
"""

import socket
import threading
from collections.abc import Callable

from torch._C._distributed_c10d import TCPStore  # torch.distributed.TCPStore, as mypy sees it

from tft.errors import AddressTaken


def serve(host: str, port: int, opened: Callable[[int], None]) -> None:
    """
    Serve at `host` and nowhere else, until this process is ended.
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
