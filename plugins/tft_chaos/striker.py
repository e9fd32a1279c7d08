"""
Makes the faults of `--chaos` in the process of one rank: installs hooks in the user's objects, and
makes faults when the session calls the hooks for observers of the training (`tft_on_…`).
"""

import atexit
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import assert_never

from tft.spi import OrderName, SessionView, hookimpl
from tft_chaos.actions import ChaosMissed, Theirs
from tft_chaos.barrier_files import BarrierFiles
from tft_chaos.bitflips import flip_state, missed_gradient, watch_gradient
from tft_chaos.group import Victim
from tft_chaos.injection_points import (
    Blow,
    mark_collectives,
    watch_backward,
    watch_collective,
    watch_forward,
    watch_speed,
    watch_update,
)
from tft_chaos.record import Ledger
from tft_chaos.spec import Bitflip, Ranks, Slow, Spec


def open_striker(specs: Sequence[Spec], session: SessionView) -> "Striker | None":
    """
    Return the object that carries out the specs (the arguments of `--chaos`) in this process.

    Return None if no spec concerns this process, or if all specs that concern the process have made
    all their faults.
    """
    ledger = Ledger(session.run_dir)
    marks = BarrierFiles(session.run_dir, session.rank)
    blows: list[Blow] = []
    joining: list[Spec] = []
    for index, spec in enumerate(specs):
        if not isinstance(spec.target, Ranks):
            continue
        if session.rank in spec.target.ranks:
            blow = Blow(
                Victim(index, spec.target.ranks, session.rank), spec, session, ledger, marks
            )
            if not blow.spent:
                blows.append(blow)
        elif spec.phase in ("collective", "repair") and any(
            ledger.fired(Victim(index, spec.target.ranks, rank).name) < spec.count
            for rank in spec.target.ranks
        ):
            joining.append(spec)
    return Striker(session, blows, joining, marks) if blows or joining else None


class Striker:
    """
    Carries out the specs (arguments of `--chaos`) that concern one process. All methods of this
    class run on the training thread.
    """

    def __init__(
        self,
        session: SessionView,
        blows: Sequence[Blow],
        joining: Sequence[Spec],
        marks: BarrierFiles,
    ) -> None:
        """
        Remember the specs that concern this rank, and remove the old marker files of the rank.

        `blows` are the objects that carry out the specs aimed at this rank. `joining` are specs
        aimed at other ranks for which this rank must write marker files.
        """
        self._session = session
        self._blows = blows
        self._joining = joining
        specs = [*joining, *(blow.spec for blow in blows)]
        self._repairs = any(spec.phase == "repair" for spec in specs)
        self._marks = marks
        self._marks.leave()
        self._model: Theirs = None
        self._others: list[Theirs] = []
        """The models of torch among the `others` that the user handed over."""
        self._optimizer: Theirs = None
        atexit.register(self._tell_unmade)

    def _tell_unmade(self) -> None:
        """
        Print, when the process ends, which specs have not made all their faults.
        """
        for blow in self._blows:
            if not blow.spent:
                sys.stderr.write(
                    f"chaos: {blow.spec.text} was not made: this rank has ended in step "
                    f"{self._session.step} and did not come to that place\n"
                )

    @hookimpl
    def tft_on_adopted(self, parts: Mapping[str, Theirs]) -> None:
        """
        In the user's model and optimizer, install the hooks that make faults during a step.
        """
        model, self._optimizer = parts["model"], parts.get("optimizer")
        self._model = model
        given = (parts.get("others") or {}).values()
        self._others = [each for each in given if hasattr(each, "named_modules")]
        if self._optimizer is None:
            self._blows = [blow for blow in self._blows if not _refused(blow.spec)]
        collectives = [spec for spec in self._joining if spec.phase == "collective"]
        if collectives:
            mark_collectives(collectives, self._marks, self._session, model)
        _each(self._blows, lambda blow: self._watch(blow, model))

    def _watch(self, blow: Blow, model: Theirs) -> None:
        match blow.spec.phase:
            case "forward" | "evaluation":
                if isinstance(blow.spec.action, Slow):
                    watch_speed(blow, blow.spec.action, model)
                else:
                    watch_forward(blow, model)
                if blow.spec.phase == "evaluation":  # it may call a moving average of the model
                    for other in self._others:
                        watch_forward(blow, other)
            case "backward":
                if isinstance(blow.spec.action, Bitflip):
                    watch_gradient(blow, blow.spec.action, model)
                else:
                    watch_backward(blow, model)
            case "collective":
                watch_collective(blow, self._marks, model)
            case "update":
                watch_update(blow, self._optimizer)
            case "between" | "tail" | "repair":
                # the methods `_between`, `tft_on_tail_ending` and `tft_on_order` make these faults
                pass
            case _:
                assert_never(blow.spec.phase)

    @hookimpl
    def tft_on_window_closed(self, step: int) -> None:
        """
        Make the faults of phase `between`, because the update window of `step` has closed.

        If a spec asks for flipped bits of a gradient in this step, also check that they were
        flipped. If bits could not be flipped, make all other faults first, and then raise
        `ChaosMissed`.
        """
        _each(self._blows, lambda blow: self._between(blow, step))

    def _between(self, blow: Blow, step: int) -> None:
        action = blow.spec.action
        if isinstance(action, Bitflip) and blow.spec.phase == "backward":
            missed_gradient(blow, step)
        elif blow.spec.phase == "between" and blow.due(step):
            if isinstance(action, Bitflip):
                flip_state(blow, action, self._model, self._optimizer, step)
            else:
                blow.fall(step, {"window_closed": step})

    @hookimpl
    def tft_on_tail_ending(self, step: int) -> None:
        """
        Make the faults of phase `tail`, because the training loop has done all work of the step,
        but the step has not ended yet.
        """
        for blow in self._blows:
            if blow.spec.phase == "tail" and blow.due(step):
                blow.fall(step, {"window_closed": step})

    @hookimpl
    def tft_on_order(self, order: OrderName, incident: int, step: int) -> None:
        """
        Make the faults of phase `repair`, before this rank carries out an order of an incident.

        Incident 0 is the start of the job, in which nothing is repaired and no fault is made.
        """
        self._marks.leave()
        if not incident or not self._repairs:
            return
        self._marks.met(incident, step)
        # Compare the spec with the highest step that any rank has recorded for this incident. A
        # replacement process has no state yet, and so does not know its own step.
        reached = self._marks.furthest(incident)
        for blow in self._blows:
            wanted = blow.spec.phase == "repair" and blow.spec.order == order and not blow.spent
            if wanted and reached >= blow.spec.step:
                blow.fall(reached, {"order": order, "incident": incident})


def _refused(spec: Spec) -> bool:
    """
    Return whether a spec cannot be carried out without an optimizer. If so, print why.
    """
    action = spec.action
    if isinstance(action, Bitflip):
        needs = action.part not in ("param", "buffer", "gradient")
        what = f"target={action.part}"
    else:
        needs, what = spec.phase == "update", "phase=update"
    if needs:
        sys.stderr.write(
            f"chaos: {spec.text} is not made: {what} needs an optimizer, and the script gives none "
            "to session.adopt\n"
        )
    return needs


def _each(blows: Sequence[Blow], strike: Callable[[Blow], None]) -> None:
    """
    Call `strike` for each of `blows`, each of which carries out one spec. Continue if a spec cannot
    be carried out.

    If some specs could not be carried out, raise `ChaosMissed` at the end, with all reasons.
    """
    missed: list[str] = []
    for blow in blows:
        try:
            strike(blow)
        except ChaosMissed as error:
            missed.append(str(error))
    if missed:
        raise ChaosMissed("; ".join(missed))
