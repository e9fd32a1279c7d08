"""
The rendezvous store: at one address, in its own process.
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
    The addresses at which somebody listens at this port.
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


def test_the_store_listens_at_its_host_alone(store: int) -> None:
    """
    When a store is open at 127.0.0.1, then it listens there and at no other address.
    """
    loopback = socket.inet_aton("127.0.0.1")[::-1].hex().upper()

    assert listeners(store) == [loopback]


def test_a_port_in_use_is_refused(context: ForkServerContext) -> None:
    """
    When somebody listens at the port already, then the store says so.
    """
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressTaken, match=f"127.0.0.1:{port}"):
            adaptor.tft_store("127.0.0.1", port, print)


def test_words_in_a_store_of_torchruns_are_kept_replaced_and_taken(store: int) -> None:
    """
    When processes of torchrun leave words in its store, then the first to keep some has its own kept,
    the last to put some has its own read, and what was taken is gone.
    """
    one, two = (TorchrunStore("127.0.0.1", store) for _ in range(2))

    assert [one.keep("a", "mine"), two.keep("a", "yours")] == ["mine", "mine"]
    one.put("b", "of an earlier attempt")
    one.put("b", "of this one")
    assert two.take("b") == "of this one"
    assert two.keep("b", "fresh") == "fresh"


def test_a_store_that_is_not_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    When nobody serves a store where torchrun's should be, then that is said.
    """
    monkeypatch.setattr("tft_pytorch.store._ANSWER", timedelta(seconds=1))
    with closing(socket.create_server(("127.0.0.1", 0))) as once:
        port = once.getsockname()[1]
    with pytest.raises(UsageError, match=f"at 127.0.0.1:{port} does not answer"):
        TorchrunStore("127.0.0.1", port)
