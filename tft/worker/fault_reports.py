"""
The fault reports of one rank. A report tells the controller which fault an exception means.
"""

import traceback
from collections.abc import Sequence
from dataclasses import replace

import pluggy
import structlog

from tft.clock import SystemClock
from tft.config import RankSettings
from tft.protocol.messages import Faulted, FaultKind
from tft.spi.types import DeviceFault, Diagnosis
from tft.worker.diagnosis import Diagnostician
from tft.worker.refusal import refusal_in
from tft.worker.step_gate import Gate

log = structlog.get_logger()


class FaultReports:
    """
    Diagnoses the exceptions of one rank, and makes fault reports from them.

    `hook` has the adaptor's hooks. `added` are the lines that plugins add to the table of device
    faults.
    """

    def __init__(
        self,
        settings: RankSettings,
        hook: pluggy.HookRelay,
        added: Sequence[DeviceFault],
        gate: Gate,
    ) -> None:
        self._settings = settings
        self._hook = hook
        self._gate = gate
        self._diagnostician = Diagnostician(self._classify, added)

    def diagnose(self, error: BaseException) -> Diagnosis:
        """
        Return the diagnosis of an exception: the kind of its fault, and whether the process can
        continue.
        """
        return self._diagnostician.diagnose(error)

    def report(self, error: BaseException) -> Faulted:
        """
        Return the fault report for an exception, with the present position of this rank.
        """
        diagnosis, refusal = self.diagnose(error), refusal_in(error)
        return Faulted(
            rank=self._settings.rank,
            incarnation=self._settings.incarnation,
            kind=diagnosis.kind,
            polluted=diagnosis.polluted,
            not_after=diagnosis.not_after,
            context_lost=diagnosis.context_lost,
            refused=None if refusal is None else refusal.numbers,
            step=self._gate.completed + 1,
            summary=str(refusal or traceback.format_exception_only(error)[-1].strip()),
            traceback="".join(traceback.format_exception(error)),
            position=self._gate.position(),
            at=SystemClock().now(),
        )

    def also(self, message: Faulted | None, error: Exception) -> Faulted:
        """
        Return the fault report of a rank that could not capture its rank-local state when it left
        its loop, because of the exception `error`. `message` is the report of the fault for which
        the rank left the loop. None: it left the loop for another reason.

        If `error` shows that the device context is lost, the report of `error` replaces the report
        of a `network` fault, because the lost device may have broken the connection. Raises `error`
        if `message` is None and the device context is not lost.
        """
        lost = self.diagnose(error).context_lost
        if lost and (message is None or message.kind == "network"):
            return self.report(error)
        if message is None:
            raise error
        return replace(message, context_lost=message.context_lost or lost)

    def _classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        """
        Return the adaptor's diagnosis of an exception.

        Return None if the adaptor does not know the exception. If the hook of the adaptor fails,
        log its exception and return None as well: the report must show the exception of the script.
        """
        try:
            found: FaultKind | Diagnosis | None = self._hook.tft_classify(error=error)
        # catch everything: an error of the adaptor must not hide the exception of the script, which
        # is to be reported
        except Exception:
            log.exception("classification_failed", error=repr(error))
            return None
        return found
