"""
Functions that choose or check the network addresses of a job: the address of the broker before it
starts, and the addresses at which machines reach each other.
"""

import errno
import socket
from collections.abc import Sequence

from tft.addresses import is_loopback
from tft.bus.broker import unused_ports
from tft.config import BROKER_PORTS, RUN_OPTIONS
from tft.errors import AddressTaken, UsageError


def check_free(host: str, port: int) -> None:
    """
    Check that a broker can listen at `host`, at `port` and at the next port.

    Raises `AddressTaken` when another process listens at one of the ports. Raises `UsageError` when
    the broker cannot listen for another reason, for example because `host` is not an address of
    this machine.
    """
    for each in range(port, port + BROKER_PORTS):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # with the option SO_REUSEADDR, a port whose old connections are in TIME_WAIT counts as
            # free. The sockets of the broker have the option too, so the broker can use such a port
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, each))
                probe.listen()
            except OSError as refused:
                where = f"the broker cannot listen at {host}:{each}"
                if refused.errno == errno.EADDRINUSE:
                    raise AddressTaken(
                        f"{where}: another process listens there. Choose another port with "
                        "--broker, or with MASTER_PORT under torchrun or srun (the broker takes "
                        "that port and the next)"
                    ) from None
                raise UsageError(f"{where}: {refused.strerror}") from None


def free_address(host: str) -> str:
    """
    Return an address HOST:PORT at which a broker can listen now.

    The kernel does not use the chosen port for outgoing connections. So a restarted broker can
    listen there again (see `unused_ports`).

    Raises `AddressTaken` when no two neighbouring ports are free. Raises `UsageError` when `host`
    is not an address of this machine.
    """
    for port in unused_ports():
        try:
            check_free(host, port)
        except AddressTaken:
            continue
        return f"{host}:{port}"
    raise AddressTaken(
        f"the broker needs two neighbouring free ports on {host}, and none were found: end "
        "processes that listen at ports of this machine"
    )


def host_for_all(address: str, *, trusted: bool, named: str) -> str:
    """
    Return the IP address of node 0: the result of resolving `address` on this machine.

    `named` is the name of the environment variable that contains `address`. Error messages show
    this name. `trusted` is True if other machines may reach the job's ports, because the bus is
    encrypted or the network is trusted.

    Raises `UsageError` in three cases. First: `address` cannot be resolved. Second: `address` is
    neither a loopback address nor `localhost`, but resolves to a loopback address, which other
    machines cannot use. Third: `address` resolves to an address that is no loopback address,
    although `trusted` is False.
    """
    try:
        host = socket.gethostbyname(address)
    except OSError as error:
        raise UsageError(
            f"the address of process 0, {address}, cannot be resolved on this machine ({error}): "
            f"set {named} to an address that all machines can resolve"
        ) from None
    if is_loopback(host) and not is_loopback(address):
        raise UsageError(
            f"the address of process 0, {address}, resolves to {host} on this machine, a loopback "
            f"address, which no other machine can reach: set {named} to an address that all "
            "machines reach"
        )
    if not is_loopback(host) and not trusted:
        raise UsageError(
            "the job's processes are on several machines and exchange messages over the network, "
            "but the messages are not encrypted: whoever reaches the job's ports can run the job's "
            f"processes. Encrypt the messages with {RUN_OPTIONS}='--curve DIR' (`tft keys DIR` "
            f"makes the keys), or set {RUN_OPTIONS}=--insecure if the network is trusted"
        )
    return host


def may_be_reached(options: Sequence[str]) -> bool:
    """
    Return whether these options of `tft run` allow other machines to reach the job's ports.

    The options `--insecure` and `--curve` allow this. This function does not check the keys in the
    directory that `--curve` names, because `tft run` checks the keys.
    """
    return any(word.partition("=")[0] in ("--insecure", "--curve") for word in options)


def own_address(host: str) -> str:
    """
    Return the IP address at which the machine `host` can reach this machine.

    Raises `UsageError` when this machine has no route to `host`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # `connect` on a UDP socket sends nothing: it only makes the kernel choose the route to
            # `host`, and with it this machine's own address
            probe.connect((host, 9))
        except OSError as error:
            raise UsageError(
                f"this machine has no route to {host}, the machine of process 0 "
                f"({error.strerror}): check the address and the network of this machine"
            ) from None
        return str(probe.getsockname()[0])
