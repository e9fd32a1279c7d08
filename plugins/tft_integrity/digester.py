"""
Digests one slice after each step. A large slice is digested on a thread of its own while the next
step computes.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tft.spi import SessionView

log = logging.getLogger(__name__)


class Digester:
    """
    Digests the slices of the shards of one rank. Each shard has `of` slices.
    """

    def __init__(self, session: SessionView, of: int) -> None:
        self._session = session
        self._of = of
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None

    def tft_on_step_ended(self, step: int) -> None:
        """
        Digest the slice of this step, or let the thread digest it if it is large.
        """
        work = self._session.digest_slice(step % self._of, self._of)
        if work is None:
            return
        if self._thread is None and not self._start():
            work()
            return
        self._busy = True
        self._work.put(work)

    def tft_on_state_released(self) -> None:
        """
        Wait until the thread has digested its slice, because the bytes may change from now on.
        """
        if self._busy:
            self._busy = False
            error = self._done.get()
            if error is not None:
                log.warning("a slice was not digested, and is not compared", exc_info=error)

    def _start(self) -> bool:
        """
        Start the thread that digests large slices. Return False if the system cannot start another
        thread.
        """
        thread = threading.Thread(target=self._run, name="tft-integrity", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while True:
            work = self._work.get()
            try:
                work()
            except BaseException as error:  # noqa: BLE001 (the training thread logs it)
                self._done.put(error)
            else:
                self._done.put(None)
            del (
                work
            )  # `work` refers to the shards, and would keep their memory during the next wait
