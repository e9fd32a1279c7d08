"""
What an exception stands for: a fault and of which kind, or the user's own bug; and whether the process
can go on after it.

Asked in this order, of the exception and then of those it was raised from: its own word
(`tft_fault_kind`), the lines that plugins add, the table of device faults, the adaptor. The first that
has something to say counts; a context that any of them says is lost is lost.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from tft.hooks import DeviceFault
from tft.protocol.messages import FaultKind
from tft.worker.devices import DEVICE_FAULTS

KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """
    What an exception stands for.
    """

    kind: FaultKind
    polluted: bool = False
    """As in `Faulted`."""
    context_lost: bool = False
    """As in `Faulted`."""


class Diagnostician:
    """
    Diagnoses for one process. `classify` is the adaptor's hook, `added` are lines of plugins.
    """

    def __init__(
        self,
        classify: Callable[[BaseException], FaultKind | None],
        added: Sequence[DeviceFault] = (),
    ) -> None:
        self._classify = classify
        self._lines = (*added, *DEVICE_FAULTS)

    def diagnose(self, error: BaseException) -> Diagnosis:
        """
        What it stands for.
        """
        links = list(_chain(error))
        lines = [self._line(link) for link in links]
        said = any(getattr(link, "tft_context_lost", False) for link in links)
        kinds = (self._kind(link, line) for link, line in zip(links, lines, strict=True))
        return Diagnosis(
            kind=next(filter(None, kinds), "process" if said else "software"),
            polluted=any(getattr(link, "tft_polluted", False) for link in links),
            context_lost=said or any(line is not None and line.context_lost for line in lines),
        )

    def _kind(self, error: BaseException, line: DeviceFault | None) -> FaultKind | None:
        kind: FaultKind | None = getattr(error, "tft_fault_kind", None)
        if kind in KINDS:
            return kind
        return self._classify(error) if line is None else line.kind or "software"

    def _line(self, error: BaseException) -> DeviceFault | None:
        if not isinstance(error, RuntimeError):  # what every framework raises for its devices
            return None
        said = str(error)
        return next((line for line in self._lines if re.search(line.words, said)), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """
    An exception, and what it was raised from.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
