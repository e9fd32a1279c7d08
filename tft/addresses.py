"""
Addresses at which tft listens: how they are written, and whether other machines can reach them.
"""

import ipaddress
import socket
from dataclasses import dataclass

from tft.errors import UsageError


def is_loopback(host: str) -> bool:
    """
    Return whether `host` is a loopback address, which only this machine can reach.

    The only host name that counts as loopback is `localhost`.
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenAddress:
    """
    An address at which a server listens.
    """

    host: str
    port: int
    """0: a free port is chosen."""

    @property
    def loopback(self) -> bool:
        """
        True if only this machine can reach the address.
        """
        return is_loopback(self.host)

    @property
    def family(self) -> socket.AddressFamily:
        """
        The family of the socket that listens.
        """
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    @property
    def target(self) -> str:
        """
        The address as text, such as `127.0.0.1:9464` or `[::1]:9464`.
        """
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_address(text: str, option: str, example: str) -> ListenAddress:
    """
    Return the address in `text`, which is the value of the command-line option `option` and has the
    form ADDRESS:PORT. Raises `UsageError` if `text` has another form. The message names the option
    and shows `example`.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise UsageError(
            f"{option} {text!r} is not an address: expected is ADDRESS:PORT, such as {example}; "
            "port 0 chooses a free port"
        )
    return ListenAddress(host=host.strip("[]"), port=int(port))
