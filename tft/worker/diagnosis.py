"""
The diagnosis of an exception: which kind of fault it is (a bug of the script is a kind too), and
whether the process can continue.

The exception is examined first, then the exceptions from which it was raised. For each of them
these sources are asked, in this order: the kind that a `TrainingFault` declares, the lines that
plugins add, the table of device faults, the adaptor. The first source that knows one of the
exceptions decides the kind. A line of the table that calls an error a bug of the script counts only
if the adaptor does not know the exception. The device context counts as lost if any source says so
for any of these exceptions.
"""

import re
from collections.abc import Callable, Sequence

from tft.errors import chain_of
from tft.protocol.messages import FaultKind
from tft.spi.faults import TrainingFault
from tft.spi.types import DeviceFault, Diagnosis
from tft.worker.devices import DEVICE_FAULTS


class Diagnostician:
    """
    Diagnoses the exceptions of one process.

    `classify` is the adaptor's hook `tft_classify`. `added` are the lines that plugins add to the
    table of device faults.
    """

    def __init__(
        self,
        classify: Callable[[BaseException], FaultKind | Diagnosis | None],
        added: Sequence[DeviceFault] = (),
    ) -> None:
        self._classify = classify
        self._lines = (*added, *DEVICE_FAULTS)

    def diagnose(self, error: BaseException) -> Diagnosis:
        """
        Return the diagnosis of an exception: the kind of its fault, and whether the process can
        continue.

        If no source knows the kind, the kind is `software`, a bug of the user's script. But the
        kind is `process` if a `TrainingFault` declares that the device context is lost, because a
        script that declares this has met a fault, not a bug.
        """
        links = list(chain_of(error))
        lines = [self._line(link) for link in links]
        declared = [link for link in links if isinstance(link, TrainingFault)]
        lost = any(fault.context_lost for fault in declared)
        classified = [self._classified(link) for link in links]
        each = map(self._found, links, lines, classified)
        found = next(filter(None, each), Diagnosis(kind="software"))
        limits = [found.not_after, *(fault.not_after for fault in declared)]
        return Diagnosis(
            kind="process" if lost and found.kind == "software" else found.kind,
            polluted=found.polluted or any(fault.polluted for fault in declared),
            not_after=min((step for step in limits if step is not None), default=None),
            context_lost=found.context_lost
            or lost
            or any(line is not None and line.context_lost for line in lines)
            or any(answer is not None and answer.context_lost for answer in classified),
        )

    def _found(
        self, error: BaseException, line: DeviceFault | None, classified: Diagnosis | None
    ) -> Diagnosis | None:
        """
        Return the diagnosis of one exception, without the exceptions that it was raised from. None
        if no source knows the exception. `classified` is the answer of the adaptor.

        If the exception declares that the device context is lost, this method ignores that;
        `diagnose` adds it.
        """
        if isinstance(error, TrainingFault) and error.kind is not None:
            return Diagnosis(kind=error.kind)
        if line is not None and line.kind is not None:
            return Diagnosis(kind=line.kind)
        # ask the adaptor before the error counts as a bug of the script: the adaptor may know
        # another cause of the error
        return classified or (None if line is None else Diagnosis(kind="software"))

    def _classified(self, error: BaseException) -> Diagnosis | None:
        """
        Return the adaptor's answer for one exception; None if the adaptor does not know it.
        """
        classified = self._classify(error)
        if classified is None or isinstance(classified, Diagnosis):
            return classified
        return Diagnosis(kind=classified)

    def _line(self, error: BaseException) -> DeviceFault | None:
        # the table is only for `RuntimeError`, which all frameworks raise for device errors
        if not isinstance(error, RuntimeError):
            return None
        said = str(error)
        return next((line for line in self._lines if re.search(line.words, said)), None)
