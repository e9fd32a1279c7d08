"""
The rendezvous store: at one address, in its own process.
"""

import socket
from contextlib import closing
from multiprocessing.context import ForkServerContext

import pytest
import tft_pytorch

from tft.errors import AddressTaken


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
            tft_pytorch.tft_store("127.0.0.1", port, print)
