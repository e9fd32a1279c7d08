"""
Where the broker of a job listens: found, or checked, before it is started.
"""

import errno
import socket

from tft.bus.broker import unused_ports
from tft.config import BROKER_PORTS
from tft.errors import AddressTaken, UsageError


def check_free(host: str, port: int) -> None:
    """
    Raises `AddressTaken` where a broker could not listen, and `UsageError` where the host is not
    one of this machine's.
    """
    for each in range(port, port + BROKER_PORTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the broker will: a port whose last connections are still fading is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, each))
                probe.listen()
            except OSError as refused:
                where = f"the broker cannot listen at {host}:{each}"
                if refused.errno == errno.EADDRINUSE:
                    raise AddressTaken(
                        f"{where}: another process does; choose another --broker, or MASTER_PORT "
                        "under another launcher (the broker takes that port and the next)"
                    ) from None
                raise UsageError(f"{where}: {refused.strerror}") from None


def free_address(host: str) -> str:
    """
    HOST:PORT where a broker can listen, and can again should it be started again.
    """
    for port in unused_ports():
        try:
            check_free(host, port)
        except AddressTaken:
            continue
        return f"{host}:{port}"
    raise AddressTaken(f"no two neighbouring ports of {host} are free")
