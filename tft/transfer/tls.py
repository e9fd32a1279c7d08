"""
TLS for encrypted transfers. Both ends of a connection present the same certificate, the certificate
of the job.
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
    The TLS contexts of a rank: `giving` for its server, `fetching` for its connections as a client.
    """

    giving: ssl.SSLContext
    fetching: ssl.SSLContext


def read_tls(curve: Path | None) -> Tls | None:
    """
    Read the keys in the directory `curve`, and return TLS contexts that use them.

    Returns None when `curve` is None. Raises `UsageError` when the keys cannot be used.
    """
    if curve is None:
        return None
    giving, fetching = (
        _context(curve, side) for side in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    # do not send tickets for resuming a TLS session, because no client of a transfer resumes one
    giving.num_tickets = 0
    return Tls(giving=giving, fetching=fetching)


def reader(connection: socket.socket) -> Callable[[Views], int]:
    """
    Return a function that reads from the socket `connection` into a list of memoryviews.

    The function waits for bytes, fills the views from the first one on, and returns the number of
    bytes. The result 0 means that the peer has closed the connection.
    """
    # an SSL socket can read into only one view in a call
    if isinstance(connection, ssl.SSLSocket):
        return lambda views: connection.recv_into(views[0])
    return lambda views: connection.recvmsg_into(views)[0]


def sender(connection: socket.socket) -> Callable[[Views], int]:
    """
    Return a function that writes a list of memoryviews to the socket `connection`.

    The function sends as many bytes as the connection accepts at once, and returns their number.
    This may be fewer bytes than the views have.
    """
    if isinstance(connection, ssl.SSLSocket):
        return lambda views: connection.send(views[0])
    return connection.sendmsg


def _context(curve: Path, side: int) -> ssl.SSLContext:
    key, certificate = transfer_files(curve)
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The host name is not checked: any peer with the job's certificate and key belongs to the job,
    # on whatever machine it runs.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(certificate)
    except (ssl.SSLError, OSError) as wrong:
        raise UsageError(
            f"--curve {curve}: {key.name} and {certificate.name} are not a pair ({wrong}); copy "
            "the directory as `tft keys` has made it"
        ) from None
    return context
