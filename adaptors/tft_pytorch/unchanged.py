"""
Checks that building a wrapper does not change the parameters.

Ranks compare their copies before wrappers (such as DDP) are built. No comparison would notice a
change after that. So the parameters are read once more when the wrapper is built. Another thread
reads them while the ranks wait for each other.
"""

import threading
from collections.abc import Callable, Mapping

from tft.errors import StateChanged

Read = Callable[[], str]
"""A function that reads the parameters of a shard and returns their digest."""


class Unchanged:
    """
    Compares digests of the parameters of one rank at two moments: when the ranks compared their
    copies, and after the wrapper was built.

    All methods must be called on the training thread. Only `compared` may be called on another
    thread, as long as the call ends before `begin` is called.
    """

    def __init__(self) -> None:
        self._compared: dict[str, str] = {}
        """The digest of the parameters of each shard when the ranks compared their copies."""
        self._reading: threading.Thread | None = None
        self._expected: dict[str, str] = {}
        """The digest that the parameters of each shard must still have. The thread `_reading`
        computes their present digests."""
        self._found: dict[str, str] = {}
        """The digest of the parameters of each shard after the wrapper was built."""
        self._error: Exception | None = None

    def compared(self, shard: str, digest: str) -> None:
        """
        Store `digest`, the digest of the parameters of a shard that the ranks compare with each
        other.
        """
        self._compared[shard] = digest

    def forget(self) -> None:
        """
        Forget the digests, because the parameters may change from now on.
        """
        self._compared = {}

    def begin(self, reading: Callable[[str], Read]) -> None:
        """
        Begin to read the parameters of all shards that were compared, on another thread. Call this
        when the wrapper is built. `reading(shard)` returns the function that reads a shard.
        """
        self._expected, self._compared = self._compared, {}
        reads = {shard: reading(shard) for shard in self._expected}
        if not reads:
            return
        self._reading = threading.Thread(
            target=self._read, args=(reads,), name="tft-unchanged", daemon=True
        )
        try:
            self._reading.start()
        except RuntimeError:  # the system has no more threads
            self._reading = None
            self._read(reads)

    def wait(self) -> None:
        """
        Wait until the parameters are read. Call this before anything may change them, and before
        they are compared again.

        Raises `StateChanged` if building the wrapper has changed them.
        """
        if self._reading is not None:
            self._reading.join()
            self._reading = None
        found, self._found = self._found, {}
        error, self._error = self._error, None
        if error is not None:
            raise error
        changed = [shard for shard, digest in found.items() if digest != self._expected[shard]]
        if changed:
            raise StateChanged(
                f"the parameters of shard {changed[0]!r} have changed while the wrapper of the model "
                "was built, although no step was trained: the function that builds it (wrap or make "
                "of session.adopt) must not change them"
            )

    def _read(self, reads: Mapping[str, Read]) -> None:
        try:
            self._found = {shard: read() for shard, read in reads.items()}
        except Exception as error:  # noqa: BLE001  # raised on the training thread, in `wait`
            self._error = error
