"""
Reads and checks the address of `--metrics`, before any process of the job is started.
"""

import ipaddress
import socket
from dataclasses import dataclass

from tft.errors import UsageError

EXAMPLE = "127.0.0.1:9464"
FILE = "metrics.json"
"""The file in the run directory, unless another is named, with the address at which the metrics are served, in the form of
Prometheus's service discovery by files (`file_sd_configs`)."""
_CONSENT = "insecure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """
    Where the metrics are served.
    """

    host: str
    port: int
    """0: a free port is chosen."""
    insecure: bool = False
    """True if the operator has agreed that other machines can read the metrics."""

    @property
    def target(self) -> str:
        """
        The address as Prometheus writes it, such as `127.0.0.1:9464` or `[::1]:9464`.
        """
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def family(self) -> socket.AddressFamily:
        """
        The family of the socket that listens.
        """
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def text(self) -> str:
        """
        Return the text from which `read` makes this address again.
        """
        return f"{self.target} {_CONSENT}" if self.insecure else self.target

    @classmethod
    def read(cls, text: str, option: str) -> "Address":
        """
        Return the address that `text` names: ADDRESS:PORT, and `insecure` after a space where other
        machines may read the metrics. `option` is what the text was given to, for the error message.

        Raises `UsageError` if `text` is no address, or if other machines can reach it without that
        word.
        """
        words = text.split()
        target, insecure = words[0] if words else "", words[1:] == [_CONSENT]
        host, colon, port = target.rpartition(":")
        known = len(words) == 1 + insecure and colon and host and port.isdecimal()
        if not known or int(port) > 65535:
            raise UsageError(
                f"{option} {text!r} is not an address: expected is ADDRESS:PORT, such as {EXAMPLE}; "
                "port 0 chooses a free port"
            )
        address = cls(host=host.strip("[]"), port=int(port), insecure=insecure)
        if not insecure and not _is_loopback(address.host):
            raise UsageError(
                f"{option} {target} can be reached from other machines, and the metrics are not "
                "encrypted, also with --curve: whoever reaches this address can read the name and "
                "the progress of the job. Choose an address of this machine alone, such as "
                f"{EXAMPLE}, or add --insecure if the network is trusted"
            )
        return address

    def check_free(self, option: str) -> None:
        """
        Check that a server can listen at this address now. Raises `UsageError` otherwise.
        """
        try:
            with socket.socket(self.family, socket.SOCK_STREAM) as probe:
                # as the server does: a port with old connections in TIME_WAIT is free
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
                probe.listen()
        except OSError as refused:
            raise UsageError(
                f"{option} {self.target}: the metrics cannot be served there: {refused.strerror}. "
                "Choose another port, or 0 for a free one"
            ) from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
