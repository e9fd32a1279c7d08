"""
Digests one slice of each shard after each step, so that the controller can compare the copies that
different ranks hold. Large slices are digested on a separate thread while the next step computes.
"""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from tft.spi import SessionView

log = logging.getLogger(__name__)


class Digester:
    """
    The observer of one rank, whose methods tft calls during training. The observer digests one
    slice of each shard after each step. Each shard is divided into `of` slices.
    """

    def __init__(self, session: SessionView, of: int) -> None:
        self._session = session
        self._of = of
        session.compare_slices(of)
        self._work: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._busy = False
        self._thread: threading.Thread | None = None

    def tft_on_step_ended(self, step: int) -> None:
        """
        Digest the next slice of each shard, at the end of `step`. Large slices are digested on the
        separate thread.
        """
        work = self._session.digest_slice(step % self._of)
        if work is None:
            return
        if self._thread is None and not self._start():
            work()
            return
        self._busy = True
        self._work.put(work)

    def tft_on_state_released(self) -> None:
        """
        Wait until the separate thread has digested the slices that it was given, because the bytes
        of the slices may change after this method.
        """
        if self._busy:
            self._busy = False
            error = self._done.get()
            if error is not None:
                log.warning("a slice was not digested, and is not compared", exc_info=error)

    def _start(self) -> bool:
        """
        Start the separate thread. Return False if the operating system cannot start more threads.
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
            # delete `work` before waiting for the next one, because `work` refers to the memory of
            # the shards, which could not be freed meanwhile
            del work
