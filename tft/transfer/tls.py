"""
Transfers that are encrypted: TLS between two ranks that show each other the job's own certificate.
"""

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tft.errors import UsageError
from tft.keys import transfer_files
from tft.transfer.wire import Views


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """
    What the two ends of a connection make it of.
    """

    giving: ssl.SSLContext
    fetching: ssl.SSLContext


def read_tls(curve: Path | None) -> Tls | None:
    """
    TLS with the keys in a directory; None where there is none. Raises `UsageError` for keys that cannot
    be used.
    """
    if curve is None:
        return None
    giving, fetching = (
        _context(curve, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    giving.num_tickets = 0  # nobody comes back to a connection
    return Tls(giving=giving, fetching=fetching)


def reader(connection: socket.socket) -> Callable[[Views], int]:
    """
    Waits for bytes, puts them into the views from the first on, returns how many; 0: the end.
    """
    if isinstance(connection, ssl.SSLSocket):  # knows no views, and gives a record at a time
        return lambda views: connection.recv_into(views[0])
    return lambda views: connection.recvmsg_into(views)[0]


def sender(connection: socket.socket) -> Callable[[Views], int]:
    """
    Sends from the views what it can, returns how many bytes that was.
    """
    if isinstance(connection, ssl.SSLSocket):
        return lambda views: connection.send(views[0])
    return connection.sendmsg


def _context(curve: Path, side: int) -> ssl.SSLContext:
    key, certificate = transfer_files(curve)
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Who has the job's certificate and its key is one of us, whatever machine it is on.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(certificate)
    except (ssl.SSLError, OSError) as wrong:
        raise UsageError(
            f"--curve {curve}: {key.name} and {certificate.name} are not a pair ({wrong}); copy the "
            "directory as `tft keys` has made it"
        ) from None
    return context
