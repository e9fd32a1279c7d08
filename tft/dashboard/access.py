"""
Who may see the page of a job: the address at which it is served, the token, and the names by which
browsers may ask for it.
"""

import hmac
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from tft.bus.broker import is_loopback
from tft.errors import UsageError

LOOPBACK = "127.0.0.1:0"
"""Where the page is served unless another address is named: for this machine alone, at a free port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """
    Where the page is served.
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

    def url(self, port: int) -> str:
        """
        Return the address as a browser takes it. `port` is the port at which the page is served.
        """
        return f"http://[{self.host}]:{port}" if ":" in self.host else f"http://{self.host}:{port}"


def address_of(text: str) -> Address:
    """
    Return the address that the option `--listen` names. Raises `UsageError` if it is none.
    """
    host, colon, port = text.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= 65535):
        raise UsageError(
            f"--listen {text!r} is not an address: expected is ADDRESS:PORT, such as "
            "127.0.0.1:8080; port 0 chooses a free port"
        )
    return Address(host=host.strip("[]"), port=int(port))


class Access:
    """
    Decides whether a request is answered.

    At a loopback address there is no token. There the name in the header `Host` must be one of this
    machine, so that the page of another site cannot read this one under a name of its own (DNS
    rebinding). At any other address, each request must bring the token.
    """

    def __init__(self, address: Address) -> None:
        self.token = "" if address.loopback else secrets.token_urlsafe(32)
        """The token. Empty: none is needed."""

    def names(self, host: str) -> bool:
        """
        Return whether the header `Host` of a request may have the value `host`.
        """
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return bool(self.token) or is_loopback(name.strip("[]"))

    def admits(self, brought: Collection[str]) -> bool:
        """
        Return whether one of the tokens that a request has brought is the right one. The time of the
        comparison does not depend on the token.
        """
        expected = self.token.encode()
        return not self.token or any(
            hmac.compare_digest(each.encode(errors="replace"), expected) for each in brought
        )
