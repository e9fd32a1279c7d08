"""
Who may see the page of a job: the address at which it is served, the token, and the names by which
browsers may ask for it.
"""

import hmac
import secrets
from collections.abc import Collection

from tft.addresses import ListenAddress, is_loopback

LOOPBACK = "127.0.0.1:0"
"""Where the page is served unless another address is named: for this machine alone, at a free port."""
EXAMPLE = "127.0.0.1:8080"


class Access:
    """
    Decides whether a request is answered.

    At a loopback address there is no token. Instead, the header `Host` must name this machine. So a
    page of another site cannot read this page through a host name that the other site has made to
    point to this machine (DNS rebinding). At any other address, each request must bring the token.
    """

    def __init__(self, address: ListenAddress) -> None:
        self.token = "" if address.loopback else secrets.token_urlsafe(32)
        """The token. Empty: a request needs no token."""

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
