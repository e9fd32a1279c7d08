"""
The plugins in the controller's process. The controller tells the plugins about events of the job,
and asks them for advice on incidents. The advice goes to the job machine, the state machine that
makes all decisions. If a plugin raises an exception, the exception is logged, and the job goes on.
"""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import chain
from typing import TypeVar, get_args

import pluggy
import structlog

from tft.clock import SystemClock
from tft.core.job.commands import Consult
from tft.core.plan.topology import Replicas
from tft.errors import MalformedMessage, UsageError
from tft.plugins import call_guarded
from tft.protocol.codec import from_plain, to_plain
from tft.protocol.messages import Advised, Beat, OutsideReport
from tft.spi.types import Advice, FaultView, IncidentView, OfferView, RankBeat, RankView, Remark

log = structlog.get_logger()

_NAME = re.compile("[a-z][a-z0-9_]*")
"""The form of a remark's event (such as `rank_slow`), and of the names of the remark's facts."""
_TAKEN = frozenset({"self", "event", "at", "level", "exc_info", "stack_info", "positional_args"})
"""Names that log entries already use for other things. A fact of a plugin must not have them."""


class Advisors:
    """
    The plugins in the controller's process. They get the events of the job, and are asked
    for advice on incidents.
    """

    def __init__(self, plugins: pluggy.PluginManager) -> None:
        self._plugins = plugins
        self._asked: set[asyncio.Task[None]] = set()
        self._heed_beats = bool(plugins.hook.tft_on_beat.get_hookimpls())
        self.heed_final = bool(plugins.hook.tft_on_final_step.get_hookimpls())
        """True if some plugin has the hook `tft_on_final_step`, so that the controller must tell
        plugins up to which step the steps are final."""
        self._complained = False
        self._peers: Mapping[int, tuple[int, ...]] = {}

    def present(self) -> bool:
        """
        Return True if some plugin can give advice on incidents, because it implements the hook
        `tft_advise`.
        """
        return bool(self._plugins.hook.tft_advise.get_hookimpls())

    def led(self, report: Callable[[OutsideReport], None]) -> None:
        """
        Tell the plugins that this controller leads, and give them a function with which a plugin
        can send a report to the controller at any time. The function checks the report and passes
        it to `report`. If the report is not valid, the function raises `UsageError` in the plugin.
        """
        call_guarded(
            self._plugins, "tft_on_leader", report=lambda message: report(checked(message))
        )

    def told(self, event: str, facts: Mapping[str, object]) -> None:
        """
        Tell the plugins about an event that operators want to know of. `event` is the name of the
        event, and `facts` maps the name of each detail of the event to its value.
        """
        call_guarded(self._plugins, "tft_on_event", event=event, facts=facts)

    def closed(self, incident: Mapping[str, object], began: float) -> None:
        """
        Tell the plugins about a closed incident: its entry in the report, and the time `began` (in
        seconds since 1970), from which the times in the entry count.
        """
        call_guarded(self._plugins, "tft_on_incident_closed", incident=incident, began=began)

    def final(self, step: int | None) -> None:
        """
        Tell the plugins that all steps up to `step` are final: all ranks have ended them. `step` is
        lower than in the call before if the job has returned to an earlier step. None: nothing has
        changed, so tell nothing.
        """
        if step is not None:
            call_guarded(self._plugins, "tft_on_final_step", step=step)

    def resumed(self, replicas: Replicas) -> None:
        """
        Record which ranks hold copies of the same shards from now on. Call this method when
        training resumes.
        """
        if self._heed_beats:
            self._peers = replicas.peers()

    def beat(self, beat: Beat) -> list[Remark]:
        """
        Tell the plugins about a heartbeat of a node. Return their remarks about the job. An answer
        that is no valid remark is logged once and ignored.
        """
        if not self._heed_beats:
            return []
        ranks = tuple(
            RankBeat(
                rank=pulse.rank,
                incarnation=pulse.incarnation,
                step=pulse.position.step,
                training=pulse.training,
                moved=pulse.moved,
                work=pulse.work,
                peers=self._peers.get(pulse.rank, ()),
            )
            for pulse in beat.pulses
        )
        answers = call_guarded(self._plugins, "tft_on_beat", node=beat.node, ranks=ranks)
        remarks = []
        for remark in chain.from_iterable(map(_listed, answers)):
            if isinstance(remark, Remark) and _is_valid(remark):
                remarks.append(remark)
            elif not self._complained:
                self._complained = True
                log.error(
                    "remark_not_understood",
                    what=repr(remark),
                    why="the hook tft_on_beat must return a list of objects of the class Remark, "
                    "whose events and names of facts are words such as rank_slow, and whose values "
                    "can be written as JSON",
                )
        return remarks

    def consult(self, consult: Consult, report: Callable[[Advised], None]) -> None:
        """
        Start to ask all plugins for advice on an incident, and return at once. When all plugins
        have answered, their advice is combined into one message, and the function `report` is
        called with this message.
        """

        async def ask() -> None:
            report(await self.advise(consult))

        asking = asyncio.create_task(ask())
        # keep a reference to the task, because asyncio itself may drop a task that is not
        # referenced
        self._asked.add(asking)
        asking.add_done_callback(self._asked.discard)

    async def advise(self, consult: Consult) -> Advised:
        """
        Ask all plugins for advice on an incident, and return their combined advice. The plugins run
        on a separate thread, because a plugin may wait long, for example for an external scheduler.
        If a plugin never returns, this thread does not keep the process of the controller alive.

        An answer that is no `Advice` object is logged and ignored. If the combined advice is no
        valid message, it is logged, and the advice of all plugins is ignored.
        """
        incident = view(consult)
        answers: list[object] = await _apart(
            lambda: call_guarded(self._plugins, "tft_advise", incident=incident)
        )
        understood = [advice for advice in answers if isinstance(advice, Advice)]
        strange = [answer for answer in answers if not isinstance(answer, Advice)]
        try:
            advised = checked(joined(consult, understood))
        except Exception as error:  # noqa: BLE001 (a plugin may put anything into its fields)
            strange.append(error)
            advised = joined(consult, [])
        known = {offer.strategy for offer in consult.offers}
        strange += [f"no strategy is called {name!r}" for name in advised.veto if name not in known]
        if strange:
            log.error("advice_not_understood", what=[str(answer) for answer in strange])
        return advised


async def _apart(function: Callable[[], list[object]]) -> list[object]:
    """
    Call `function` on a daemon thread, and return its result. `asyncio.to_thread` is not used,
    because its threads are no daemon threads: Python waits for them before the process ends.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[list[object]] = loop.create_future()

    def settle(result: list[object] | None, error: BaseException | None) -> None:
        if done.done():
            return  # the caller was cancelled, so nobody waits for the result
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result or [])

    def run() -> None:
        result, failed = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001 (whoever waits for the result raises it)
            failed = error
        with suppress(RuntimeError):  # the controller may have closed its event loop meanwhile
            loop.call_soon_threadsafe(settle, result, failed)

    threading.Thread(target=run, name="advice", daemon=True).start()
    return await done


def _is_valid(remark: Remark) -> bool:
    # a plugin may have put a value of any type into each field
    facts: object = remark.facts
    if not isinstance(facts, Mapping) or not _TAKEN.isdisjoint(facts):
        return False
    names: list[object] = [remark.event, *facts]
    if not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        return False
    try:
        json.dumps(facts, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False  # a value that JSON cannot represent cannot be written to the report
    return True


def _listed(answer: object) -> Iterable[object]:
    return answer if isinstance(answer, list | tuple) else [answer]


Said = TypeVar("Said", bound=OutsideReport)


def checked(message: Said) -> Said:
    """
    Return `message` itself if it is a report that a plugin may send, and is valid. An invalid
    message must not get into the story (the record of all events), because a restarted controller
    could then not read the story.

    Otherwise raises `UsageError`, which says what is wrong.
    """
    if not isinstance(message, get_args(OutsideReport)):
        raise UsageError(f"{message!r} is not a report that a plugin may send")
    try:
        from_plain(*to_plain(message))
    except (MalformedMessage, TypeError, ValueError) as error:
        raise UsageError(f"a plugin has sent a wrong report: {error}") from error
    return message


def view(consult: Consult) -> IncidentView:
    """
    Return the description of an incident for plugins. The description contains the faults of the
    incident, the strategies from which a plugin may choose (`offers`), and the state of the ranks.
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
                joining=offer.joining,
                replaced=offer.replace,
                reload=offer.reload,
            )
            for offer in consult.offers
        ),
        ranks=tuple(RankView(**asdict(each)) for each in consult.ranks),
        until=consult.until,
    )


def joined(consult: Consult, answers: list[Advice]) -> Advised:
    """
    Combine the advice of several plugins on an incident into one report. The strategy comes from
    the first plugin that names a strategy. The vetoes of all plugins apply. The wait before the
    decision is the longest one for which a plugin asks.
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
