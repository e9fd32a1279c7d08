"""
Values on which all ranks agree before there are process groups, such as the directory of the logs.

Lightning would broadcast such values from rank 0 while it sets up. With this module, rank 0 writes
each value to a file in the run directory, in the order of the broadcasts. The other ranks read the
value there. A process that replaces a lost rank reads the values that are in the file already, also
on rank 0. So such a process need not wait for other ranks.
"""

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore  # the class torch.distributed.FileStore

from tft.errors import UsageError
from tft.spi import pack, unpack

_LIMIT = timedelta(hours=1)
"""The most time that the other ranks wait for a value of rank 0. The limit is long, because rank 0
may first prepare the data."""


class Agreed:
    """
    Writes values into a file in the directory `place` if `rank` is 0, and reads them there on all
    ranks.
    """

    def __init__(self, place: Path, rank: int) -> None:
        place.mkdir(parents=True, exist_ok=True)
        # with -1 as the number of processes, torch does not delete the file when the processes end
        self._store = FileStore(str(place / "agreed"), -1)
        self._store.set_timeout(_LIMIT)
        self._rank = rank
        self._next: dict[str, int] = {}

    def value(self, own: Any, phase: str = "") -> Any:  # Any: of the script or of Lightning
        """
        Return the next value of `phase`: what the first process of rank 0 has passed as `own` in
        the same call. The values of each phase are counted separately, because a replacement
        process leaves some phases out.

        Raises `UsageError` if `own` cannot be written.
        """
        number = self._next.get(phase, 0)
        self._next[phase] = number + 1
        key = f"{phase}{number}"
        if self._rank == 0 and not self._store.check([key]):
            self._store.set(key, self._packed(own))  # type: ignore[arg-type]  # it takes bytes
        return unpack(self._store.get(key))

    def _packed(self, own: Any) -> bytes:
        try:
            return pack(os.fspath(own) if isinstance(own, os.PathLike) else own)
        except UsageError as error:
            raise UsageError(
                f"the value of type {type(own).__name__} cannot be broadcast before training "
                f"begins, because there are no process groups yet: {error}. Broadcast plain values, "
                "or broadcast in a hook that is called while training"
            ) from None
