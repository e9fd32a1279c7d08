"""
The recovery plugins of a controller: told what happens, asked what to do. They run under the
guard of `call_guarded`; what they advise comes back to the machine as an event like any other.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar, get_args

import pluggy
import structlog

from tft.clock import SystemClock
from tft.core.commands import Consult
from tft.errors import MalformedMessage, UsageError
from tft.hooks import Advice, FaultView, IncidentView, OfferView
from tft.plugins import call_guarded
from tft.protocol.codec import from_plain, to_plain
from tft.protocol.messages import Advised, OutsideReport

log = structlog.get_logger()


class Advisors:
    """
    All plugins of this process that want a say in a recovery.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins

    def present(self) -> bool:
        """
        Somebody wants to be asked.
        """
        return bool(self._plugins.hook.tft_advise.get_hookimpls())

    def led(self, report: Callable[[OutsideReport], None]) -> None:
        """
        This controller leads: whoever wants to may report to it from now on.
        """
        call_guarded(
            self._plugins, "tft_on_leader", report=lambda message: report(checked(message))
        )

    def told(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Something an operator wants to know has happened.
        """
        call_guarded(self._plugins, "tft_on_event", event=event, facts=facts)

    async def advise(self, consult: Consult) -> Advised:
        """
        Asks all of them, on a thread of their own: an external scheduler takes its time.
        """
        incident = view(consult)
        answers: list[object] = await asyncio.to_thread(
            call_guarded, self._plugins, "tft_advise", incident=incident
        )
        understood = [advice for advice in answers if isinstance(advice, Advice)]
        strange = [answer for answer in answers if not isinstance(answer, Advice)]
        try:
            advised = checked(joined(consult, understood))
        except UsageError as error:
            strange.append(error)
            advised = joined(consult, [])
        if strange:
            log.error("advice_not_understood", what=[str(answer) for answer in strange])
        return advised


Said = TypeVar("Said", bound=OutsideReport)


def checked(message: Said) -> Said:
    """
    The same message, if it is one that anybody could read. What is no message must not come into
    the story: nobody could go on with it. Raises `UsageError`, which says what is wrong.
    """
    if not isinstance(message, get_args(OutsideReport)):
        raise UsageError(f"{message!r} is no report; see the reports of people and plugins")
    try:
        from_plain(*to_plain(message))
    except (MalformedMessage, TypeError, ValueError) as error:
        raise UsageError(f"a plugin says {error}") from error
    return message


def view(consult: Consult) -> IncidentView:
    """
    What a plugin sees of an incident.
    """
    return IncidentView(
        number=consult.incident,
        round=consult.round,
        faults=tuple(
            FaultView(kind=f.kind, rank=f.rank, step=f.step, evidence=f.evidence)
            for f in consult.faults
        ),
        offers=tuple(
            OfferView(
                strategy=offer.strategy,
                why=offer.why,
                why_not=offer.why_not,
                step=offer.step,
                leaving=offer.leaving,
            )
            for offer in consult.offers
        ),
        until=consult.until,
    )


def joined(consult: Consult, answers: list[Advice]) -> Advised:
    """
    Several plugins as one voice: the first to name a strategy is heard, every veto counts, and
    the longest wait that anybody asks for.
    """
    named = next((advice for advice in answers if advice.strategy), Advice(why="no advice"))
    return Advised(
        incident=consult.incident,
        round=consult.round,
        strategy=named.strategy,
        base=named.base,
        not_after=named.not_after,
        skip=named.skip,
        replace=named.replace,
        veto=tuple(sorted({strategy for advice in answers for strategy in advice.veto})),
        wait=max((advice.wait for advice in answers), default=0.0),
        why="; ".join(advice.why for advice in answers if advice.why) or named.why,
        at=SystemClock().now(),
    )
