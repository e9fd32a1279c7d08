"""
Where the broker of a job listens: found, or checked, before it is started. And which address of a
machine others reach it at.
"""

import errno
import socket
from collections.abc import Sequence

from tft.bus.broker import is_loopback, unused_ports
from tft.config import BROKER_PORTS, RUN_OPTIONS
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


def host_for_all(address: str, *, trusted: bool, named: str) -> str:
    """
    The address of node 0 as this machine knows it; `named` is the variable that says it. Raises
    `UsageError` where it is of no use to others, and where nobody has said that ports may be reached
    by others, because all is encrypted or because the network is to be `trusted`.
    """
    try:
        host = socket.gethostbyname(address)
    except OSError as error:
        raise UsageError(
            f"the address of process 0, {address}, is not known here ({error}): set {named} to one "
            "that is known on all machines"
        ) from None
    if is_loopback(host) and not is_loopback(address):
        raise UsageError(
            f"the address of process 0, {address}, is {host} here, where no other machine reaches it: "
            f"set {named} to an address that all machines reach"
        )
    if not is_loopback(host) and not trusted:
        raise UsageError(
            "the job's processes are on several machines, which must reach its ports, and the bus "
            "is not encrypted: whoever reaches it can run the job's processes. Encrypt it with "
            f"{RUN_OPTIONS}='--curve DIR', or set {RUN_OPTIONS}=--insecure if the network is trusted"
        )
    return host


def may_be_reached(options: Sequence[str]) -> bool:
    """
    Whether options of `tft run` allow ports that other machines reach. `tft run` looks at the keys.
    """
    return any(word.partition("=")[0] in ("--insecure", "--curve") for word in options)


def own_address(host: str) -> str:
    """
    The address at which the machine `host` reaches this one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # nothing is sent; the kernel says which way it would go
        except OSError as error:
            raise UsageError(
                f"there is no way from this machine to that of process 0, {host}: {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])
