"""
Reads and checks the address of `--metrics`, before any process of the job is started.
"""

import socket
from dataclasses import dataclass
from typing import Self

from tft.errors import UsageError
from tft.spi import ListenAddress, read_address

EXAMPLE = "127.0.0.1:9464"
FILE = "metrics.json"
"""The name of the file in the run directory to which the address of the metrics is written, unless
the operator names another file. The file has the form of Prometheus's service discovery by files
(`file_sd_configs`)."""
_CONSENT = "insecure"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address(ListenAddress):
    """
    The address at which the metrics are served.
    """

    insecure: bool = False
    """True if the operator has agreed that other machines can read the metrics."""

    def text(self) -> str:
        """
        Return the text from which `read` makes this address again.
        """
        return f"{self.target} {_CONSENT}" if self.insecure else self.target

    @classmethod
    def read(cls, text: str, option: str) -> Self:
        """
        Return the address in `text`, which has the form ADDRESS:PORT or `ADDRESS:PORT insecure`.
        With the word `insecure`, other machines may read the metrics. `option` is the option or the
        variable that contained the text, for the error message.

        Raises `UsageError` if `text` is no address. Also raises `UsageError` if other machines can
        reach the address and the word `insecure` is missing.
        """
        words = text.split()
        insecure = words[1:] == [_CONSENT]
        target = words[0] if len(words) == 1 + insecure else text
        plain = read_address(target, option, EXAMPLE)
        address = cls(host=plain.host, port=plain.port, insecure=insecure)
        if not insecure and not address.loopback:
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
                # set this option as the server does, so that a port counts as free if it has only
                # old connections in the state TIME_WAIT
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((self.host, self.port))
                probe.listen()
        except OSError as refused:
            raise UsageError(
                f"{option} {self.target}: the metrics cannot be served there: {refused.strerror}. "
                "Choose another port, or 0 for a free one"
            ) from None
