"""
The exception with which scripts, plugins and adaptors declare a fault.
"""

from typing import get_args

from tft.protocol.messages import FaultKind

FAULT_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)
"""All kinds of faults."""


class TrainingFault(Exception):
    """
    Declare a fault of the rank that raises this exception.

    tft then repairs the job, as for a fault that an adaptor has recognised. tft also does so if
    another exception that was raised from a `TrainingFault` leaves the training loop.

    `text` says what happened, and appears in the report. `kind` is the kind of fault. If `kind` is
    None, the exceptions from which the `TrainingFault` was raised decide the kind. `polluted=True`
    says that the last update may have spread wrong numbers to all ranks. Then no copy of the state
    after that update is used. `not_after` is the last step before the numbers went wrong: all ranks
    return to the end of that step or of an earlier step. `context_lost=True` says that this process
    cannot continue, so that another process must take its place.

    Raises `ValueError` for an unknown kind, or for a `not_after` that is no step.
    """

    kind: FaultKind | None = None
    polluted: bool = False
    not_after: int | None = None
    context_lost: bool = False

    def __init__(
        self,
        text: str,
        *,
        kind: FaultKind | None = None,
        polluted: bool = False,
        not_after: int | None = None,
        context_lost: bool = False,
    ) -> None:
        if kind is not None and kind not in FAULT_KINDS:
            raise ValueError(
                f"the kind of a TrainingFault must be one of {', '.join(FAULT_KINDS)}, not {kind!r}"
            )
        if not_after is not None and (type(not_after) is not int or not_after < 0):
            raise ValueError(
                "the not_after of a TrainingFault must be the number of a step, 0 or more, not "
                f"{not_after!r}"
            )
        super().__init__(text)
        self.kind = kind
        self.polluted = polluted
        self.not_after = not_after
        self.context_lost = context_lost
