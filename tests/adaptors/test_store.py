"""
The rendezvous store, which runs in its own process and listens at one address only.
"""

import socket
from contextlib import closing
from datetime import timedelta
from multiprocessing.context import ForkServerContext

import pytest
from tft_pytorch import adaptor
from tft_pytorch.store import TorchrunStore

from tft.errors import AddressTaken, UsageError


def listeners(port: int) -> list[str]:
    """
    Return the local addresses at which a socket listens on this port.
    """
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for line in list(lines)[1:]:
                local, state = line.split()[1], line.split()[3]
                address, _, number = local.rpartition(":")
                if state == "0A" and int(number, 16) == port:
                    found.append(address)
    return found


def test_store_listens_at_its_host_only(store: int) -> None:
    """When a store is open at 127.0.0.1, then it listens at that address and at no other."""
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()

    assert listeners(store) == [loopback]


def test_store_refuses_a_port_in_use(context: ForkServerContext) -> None:
    """When another process already listens at the port, then the store reports this."""
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=f"127.0.0.1:{port}"):
            adaptor.tft_store("127.0.0.1", port, print)


def test_values_in_the_torchrun_store_are_kept_replaced_and_taken(store: int) -> None:
    """When processes write to torchrun's rendezvous store, then `keep` keeps the first value and
    `put` replaces the value. A value that was taken is removed."""
    one, two = (TorchrunStore("127.0.0.1", store) for _ in range(2))

    assert [one.keep("a", "mine"), two.keep("a", "yours")] == ["mine", "mine"]
    one.put("b", "of an earlier attempt")
    one.put("b", "of this one")
    assert two.take("b") == "of this one"
    assert two.keep("b", "fresh") == "fresh"


def test_missing_torchrun_store_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no process serves torchrun's rendezvous store at its address, then the message says that
    the address does not answer."""
    monkeypatch.setattr("tft_pytorch.store._ANSWER", timedelta(seconds=1))
    with closing(socket.create_server(("127.0.0.1", 0))) as once:
        port = once.getsockname()[1]
    with pytest.raises(UsageError, match=f"at 127.0.0.1:{port} does not answer"):
        TorchrunStore("127.0.0.1", port)
