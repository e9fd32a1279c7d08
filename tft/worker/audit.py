"""
The audit of a training loop: it finds code outside the update windows whose effect an incident
would repeat or lose.

The audit compares digests of the training state at three moments: when an update window closes,
when the step ends, and before the next window opens. If it finds code whose effect an incident
cannot repair, it logs that once, with the line of the script and the remedy.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from types import CodeType, FrameType

import pluggy
import structlog

from tft.errors import Interrupted, UsageError
from tft.spi.state import part_digests
from tft.spi.types import Buffer, ShardPayload

STEPS = 20
"""The number of steps that are audited in each process. With `--audit strict` all steps are
audited."""
SET_ANEW = frozenset({"description", "settings", "scheduler", "modes", "learning_rate"})
"""The parts of the state that a script may set again at the start of each iteration. tft restores
these parts after an incident. So a change of them between the end of a step and the next update
window does no harm."""

DATA = "data"
"""The name under which the hook `tft_generators` reports the data position (which batch comes
next), beside the random generators."""

_SMALL = 64
"""The most bytes of a tensor that is small, such as a learning rate."""
_EPOCHS = (
    "Do what belongs to the end of an epoch in the tail of its last step, as in "
    "`if step % steps_per_epoch == 0: scheduler.step()`"
)
_OWN = str(Path(__file__).parent)
_CALLED: Mapping[str, str] = {
    "model": "parameters or buffers of the model",
    "master": "the master copies of the parameters",
    "weights": "parameters of the model",
    "optim": "the optimizer's state",
    "kept": "the optimizer's state",
    "settings": "the settings of the parameter groups",
    "description": "what describes the state (settings, scheduler, counters)",
    "scheduler": "the scheduler",
}
_OPTIMIZED = frozenset({"model", "master", "weights", "optim", "kept"})

log = structlog.get_logger()

Look = Mapping[tuple[str, str], str]
"""Digests of the state, by (shard, part). An empty digest means that the forward pass may change
this part, so that it is not compared."""


@dataclass(slots=True)
class _Tail:
    """
    The observations of the audit since the update window of the present step closed.
    """

    step: int
    look: Look
    generators: Mapping[str, str]
    window: str
    """The line of the update window (FILE:LINE)."""
    first: Look | None = None
    """The digests of the state just before the first collective after the update window. None: no
    collective was called since the window closed."""
    collective: str = ""
    """The line of the first collective after the update window (FILE:LINE)."""


@dataclass(slots=True)
class _Ended:
    """
    The observations of the audit at the end of a step.
    """

    step: int
    look: Look
    line: str
    tails: bool
    """True if the loop has marked the end of the step. False if the step counts as ended when its
    update window closed."""
    data: str = ""
    """The digest of the data position if the tail has moved it, otherwise an empty text."""


@dataclass(slots=True)
class _Failure:
    """
    An exception that a collective has raised in the tail of a step (after its update window).
    """

    step: int
    error: BaseException
    line: str


@dataclass(slots=True)
class _Ahead:
    """
    What the audit knows about batches and random numbers that the loop draws before its first step.
    """

    position: bool = False
    """True if `data` of `session.adopt` is the position of a framework's loop. That position moves in
    the tail of a step although the tail takes no batch."""
    entry: Mapping[str, str] | None = None
    """The digests of generators and data position when the user's function was called. None once
    the first step of that function has begun."""
    early: Mapping[str, str] = field(default_factory=dict)
    """The generators (and the data position) that the user's function has used before its first
    step. Each is mapped to the line of the script (FILE:LINE) at which the first step began."""
    head: Mapping[str, str] = field(default_factory=dict)
    """The digests of generators and data position when the present step began. Empty if `early` is
    empty, because then nothing is compared at the end of the step."""


@dataclass(slots=True)
class _Again:
    """
    What the audit compares when the user's function, or a loop over `session.steps`, begins again.
    """

    entry: Look | None = None
    """The digests of the state when the user's function was called again. None if it was not, or if
    its first step has begun."""
    whole: bool = True
    """True if `entry` has digests of the whole state. False if it has only those that cost little."""
    loops: bool = False
    """True if a loop over `session.steps` has begun, and its first step has not."""


@dataclass(slots=True, kw_only=True)
class Findings:
    """
    The findings of the audit in one process: harmful habits of the training loop.
    """

    rank: int
    strict: bool
    """True if all steps are audited, and a finding raises `UsageError` instead of being logged."""
    inexact: list[str] = field(default_factory=list)
    """The reasons why a recovery is not bit-identical on this rank: sentences for the report."""
    _named: set[tuple[str, str]] = field(default_factory=set)

    def report(
        self,
        kind: str,
        what: str,
        sentence: str,
        *,
        inexact: str = "",
        refuse: bool | None = None,
        everywhere: bool = False,
    ) -> None:
        """
        Log a finding, with `sentence` as the reason. Add `inexact`, if it is not empty, to the
        reasons why a recovery is not bit-identical. Do neither if an earlier finding had the same
        `kind` and concerned the same part of the state (`what`).

        Usually all ranks have the same finding, so only rank 0 logs the finding. With `everywhere`,
        each rank logs the finding. If `refuse` is True, raise `UsageError` instead of logging. If
        `refuse` is None, raise only in strict mode.
        """
        if self.strict if refuse is None else refuse:
            raise UsageError(
                f"{sentence}. `--audit strict` does not let a job go on like this: correct the "
                "script"
            )
        if (kind, what) in self._named:
            return
        self._named.add((kind, what))
        if self.rank == 0 or everywhere:
            log.warning("audit", finding=kind, why=sentence)
        if inexact:
            self.inexact.append(inexact)


@dataclass(slots=True)
class Audit:
    """
    The audit of one process. All methods run on the training thread, except `_entered` and
    `collective_failed`. These two may be called on any thread, and ignore calls on threads other
    than the training thread.

    `failed` is the function that the adaptor calls when a collective has failed. If that happens in
    the tail of a step, `failed` calls `collective_failed`. `loop` is the code object of the
    function of tft that calls the user's function. `awake` is called when a collective has failed
    in the tail of a step: the end of that step must be checked, even if the audit has ended.
    `position` returns the step whose window closed last, and whether the loop is in the tail of
    that step.
    """

    hook: pluggy.HookRelay
    findings: Findings
    loop: CodeType
    failed: Callable[[BaseException, bool], None]
    awake: Callable[[], None]
    position: Callable[[], tuple[int, bool]]
    _ahead: _Ahead = field(default_factory=_Ahead)
    _again: _Again = field(default_factory=_Again)
    _steps: int = 0
    _readable: bool = True
    """False once an attempt to read the state has failed. The audit then ends."""
    _tail: _Tail | None = None
    _ended: _Ended | None = None
    _failure: _Failure | None = None
    _thread: int = field(default_factory=threading.get_ident)
    _shards: tuple[str, ...] = ()

    def begin(self, shards: Iterable[str]) -> None:
        """
        Begin the audit of a state that consists of these shards. From now on the adaptor reports
        failed collectives to the audit.
        """
        self._shards = tuple(shards)
        self._watch(None)

    def leave_position(self) -> None:
        """
        Do not watch `data` in the tail of a step, because it is the position of a framework's loop.
        """
        self._ahead.position = True

    @property
    def inexact(self) -> Sequence[str]:
        """
        Return the reasons why a recovery is not bit-identical on this rank, as sentences for the
        report.
        """
        return self.findings.inexact

    @property
    def over(self) -> bool:
        """
        Return True if the audit has ended: it has audited all steps that it should, or the state
        cannot be read.
        """
        return not self._readable or (self._steps >= STEPS and not self.findings.strict)

    # ---------------------------------------------------------------- the edges of a step

    def entered(self, *, audited: bool) -> bool:
        """
        Record the state just before the user's function is called: random generators and data
        position if the next step is audited, and the rest if the function is called again. Return
        True if it is called again: then `first_step` must be called too.
        """
        self._ahead = replace(
            self._ahead, entry=self._generators() if audited else None, early={}, head={}
        )
        self._again = _Again()
        if self.position()[0] > 0:
            self._again = _Again(self._look() if audited else self._glance(), audited)
        return self._again.entry is not None

    def first_step(self, step: int) -> None:
        """
        Check the code that the user's function has run before its first step, which is `step`,
        because the function was called again.

        Raises `UsageError` in strict mode.
        """
        again, self._again = self._again, _Again()
        look = self._look() if again.whole else self._glance()
        if again.entry is None or look is None:
            return
        changed = [part for part in _changed(again.entry, look) if part != "modes"]
        if not changed:
            return
        what = f"`train` was called again and has changed {_list(changed)} before its first step, which is step {step} ({self._line()})"
        self.findings.report(
            "again",
            str(step),
            f"{what}: code that had run before the incident has run once more, such as the code "
            f"between two epochs. {_EPOCHS}",
            inexact=f"{what}: this code had run before the incident",
        )

    def loop_begins(self) -> None:
        """
        Record that a loop over `session.steps` begins.
        """
        self._again.loops = True

    def step_begins(self) -> None:
        """
        Record which generators and data the user's function has used before its first step. If this
        is the first step of a further loop over `session.steps`, check the code between the loops.

        If the loop uses one of the generators within a step too, the audit reports this when the
        update window of that step closes. Raises `UsageError` in strict mode.
        """
        loops, self._again.loops = self._again.loops, False
        if loops and self._ended is not None:
            self._between(self._ended)
        if self._ahead.entry is not None:
            moved, self._ahead.entry = self._moved(self._ahead.entry), None
            self._ahead.early = dict.fromkeys(moved, self._line())
        if self._ahead.early:
            self._ahead.head = self._generators()

    def window_closed(self, step: int, *, tails: bool) -> None:
        """
        Record the state when the update window of `step` has closed. `tails` is True if the step
        ends later, after a tail (the code of the loop between the window and the end of the step).
        """
        self._steps += 1
        self._ended = None
        if self._ahead.early:
            self._drawn_ahead(step)
        if not tails and not self._compares():
            # If the loop does not mark the ends of its steps, only `window_opens` uses digests of
            # the state. It needs the hook `tft_compare`, which this adaptor does not have. So no
            # digests are computed.
            return
        look = self._look()
        if look is None:
            return
        line = self._line()
        if not tails:
            self._ended = _Ended(step, look, line, tails)
            return
        self._tail = _Tail(step, look, self._generators(), line)
        self._watch(self._entered)

    def step_ends(self, step: int, *, leaves: bool) -> None:
        """
        Check the tail of `step` (the code of the loop after the update window), which has ended.
        `leaves` is True if an incident takes this rank out of the loop now.

        Raises `UsageError` for a finding in strict mode. Raises `Interrupted` if an incident
        interrupted the tail and the script caught the exception and continued.
        """
        tail, self._tail = self._tail, None
        failure = self._failure
        if tail is not None:
            self._watch(None)
        if failure is not None:
            self._swallowed(failure, leaves=leaves)
        for what, sentence in (self.hook.tft_unkept() or {}).items():
            self.unkept(what, sentence)
        if tail is None or tail.step != step:
            return
        look, line = self._look(), self._line()
        if look is None:
            return
        self._ended = _Ended(step, look, line, tails=True)
        moved = self._moved(tail.generators)
        if DATA in moved:
            self._ended.data = self._generators()[DATA]
        self._drawn(tail, line, [name for name in moved if name != DATA])
        if tail.first is not None:
            self._changed_after_collective(tail, look, line)

    def window_opens(self, step: int, *, tails: bool) -> None:
        """
        Check the code between the end of the last step and the window of `step`, which is about to
        open.

        Raises `UsageError` for a finding in strict mode.
        """
        ended, self._ended = self._ended, None
        if ended is not None and ended.data:
            self._taken(ended)
        if ended is None or ended.tails != tails or not self._compares():
            return
        look = self._look()
        if look is None:
            return
        where = f"between the end of step {ended.step} ({ended.line}) and the update window of step {step} ({self._line()})"
        for part in _changed(ended.look, look):
            if part in SET_ANEW:
                if not tails and part != "modes":
                    self._unended(part, where)
                continue
            if part.partition(".")[0] in _OPTIMIZED:
                what = (
                    f"{_CALLED[part.partition('.')[0]]} changed outside any update window, {where}"
                )
                self._repeated(
                    "outside",
                    part,
                    what,
                    "if a rank is lost there, the copies on the ranks differ. Put all code that "
                    "changes them into `with session.update():`; an optimizer must not step in the "
                    "backward pass",
                )
            else:
                end = "" if tails else ", and call session.end_step() at the end of the iteration"
                self._repeated(
                    "head",
                    part,
                    f"{_called(part)} changed {where}",
                    "if an incident interrupts the ranks there, some have changed it and others "
                    f"have not. Change it in the update window, or after it{end}",
                )

    def further_window(self, step: int) -> None:
        """
        Report that an iteration over `session.steps` opens more than one update window. Each window
        is one step; `step` is the step of the additional window.

        Raises `UsageError` in strict mode.
        """
        what = f"an iteration of session.steps opens more than one update window ({self._line()}, for step {step})"
        self.findings.report(
            "windows",
            "",
            f"{what}, and each window is a step: after an incident between them the loop goes on "
            "with the first one. Put all updates of an iteration into one window, or let each "
            "iteration do the part that belongs to the number of its step",
            inexact=f"{what}: after an incident the windows of an iteration may have changed places",
        )

    def collective_failed(self, step: int, error: BaseException) -> None:
        """
        Record that a collective has raised `error` in the tail of `step` (after its update window).
        Failures on other threads than the training thread are ignored.
        """
        if threading.get_ident() == self._thread and self._failure is None:
            self._failure = _Failure(step, error, self._line())
            self.awake()

    def left(self, error: BaseException | None) -> str:
        """
        Record that the loop was left with the exception `error`. `error` is None if the caller only
        reports that an incident ended the loop.

        If a collective failed in the tail of a step (after its update window), and the script
        caught the exception and continued, return the line (FILE:LINE) of that collective.
        Otherwise return an empty string.
        """
        tail, failure, ended = self._tail, self._failure, self._ended
        self._tail = self._ended = self._failure = None
        if ended is not None and ended.data:
            with suppress(Exception):  # the data may have failed, which is reported elsewhere
                self._taken(ended, refuse=False)
        if tail is not None:
            self._watch(None)
        if failure is None or _comes_from(error, failure.error):
            return ""
        if not isinstance(error, _Cut):
            # log the finding in strict mode too, instead of raising `UsageError`: the loop was left
            # already, so an exception that is raised here would not be reported as a fault of the
            # rank
            self._say_swallowed(failure, refuse=False)
        return failure.line

    def unkept(self, what: str, sentence: str) -> None:
        """
        Report a part of the state, named `what`, that changes while training and that the adaptor
        neither saves nor restores.

        Raises `UsageError` in strict mode.
        """
        self.findings.report("unkept", what, sentence, inexact=sentence)

    # ---------------------------------------------------------------- findings

    def _between(self, ended: _Ended) -> None:
        """
        Report code between two loops over `session.steps` that changes settings or the scheduler. If
        it changes other parts of the state, `window_opens` reports that.
        """
        look = self._look() if self._compares() else None
        found = [] if look is None else _changed(ended.look, look)
        changed = [part for part in found if part in SET_ANEW and part != "modes"]
        if not changed:
            return
        what = f"{_list(changed)} changed between two loops over session.steps, after step {ended.step} and before step {ended.step + 1} ({self._line()})"
        self.findings.report(
            "between",
            "",
            f"{what}: after an incident `train` is called again, and this code runs once more, or is "
            f"left out. {_EPOCHS}",
            inexact=f"{what}: an incident may repeat or undo the change",
        )

    def _taken(self, ended: _Ended, *, refuse: bool | None = None) -> None:
        """
        Report a loop that takes data in the tail of a step and at the head of the next one, such as a
        batch for validation. Called before the window of the next step opens, or when the loop is
        left before that.

        A loop that takes only the next batch in the tail is not reported: an incident restores the
        data position, and the loop takes the same batch again.
        """
        if self._ahead.position or self._generators().get(DATA) == ended.data:
            return
        what = f"the loop takes data in the tail of step {ended.step} (before {ended.line}), and again before the update window of step {ended.step + 1}"
        self.findings.report(
            "takes",
            DATA,
            f"{what}: an incident puts the data position back to where the update window closed, and "
            "the next step trains with what the tail has taken. Take batches for validation from "
            "another loader, which is not the data that session.adopt was given",
            inexact=f"{what}: after an incident the loop trains with what the tail has taken",
            refuse=refuse,
        )

    def _drawn(self, tail: _Tail, line: str, moved: Sequence[str]) -> None:
        if not moved:
            return
        what = f"generator{'s' * (len(moved) > 1)} {', '.join(moved)}"
        where = f"between the update window ({tail.window}) and the end of the step ({line})"
        self.findings.report(
            "draws",
            ", ".join(moved),
            f"the tail of step {tail.step} draws random numbers ({what}), {where}: after an "
            "incident they are drawn again, and training does not go on bit for bit. Draw there "
            "from a generator of your own, torch.Generator(); a DataLoader draws one number for "
            "each iterator unless it is given generator=",
            inexact=f"the loop draws random numbers in the tail of a step ({what}), {where}: after "
            "an incident they are drawn a second time",
        )

    def _drawn_ahead(self, step: int) -> None:
        """
        Report a loop that draws batches or random numbers ahead: once before its first step, and
        again within each step. Called when the update window of `step` closes.

        After an incident the user's function is called again with the rank-local state of the last
        closed window. The function then draws a further batch before its first step, and the batch
        that was drawn ahead before the incident is lost. So the ranks train with other data than
        they would without the incident.
        """
        moved = [name for name in self._moved(self._ahead.head) if name in self._ahead.early]
        self._ahead.head = {}
        for name in moved:
            what = "the data position" if name == DATA else f"generator {name}"
            where = f"before its first step ({self._ahead.early[name]}) and within step {step}, before the update window closes ({self._line()})"
            self.findings.report(
                "ahead",
                name,
                f"the loop moves {what} {where}: after an incident, and after a resume, the "
                "function is called again, and the batches or random numbers that it had drawn "
                "ahead are skipped. Draw the batch of a step at its start, or draw the next batch "
                "after the update window; draw what is needed once outside the function",
                inexact=f"the loop advances {what} {where}: batches taken ahead are skipped after "
                "an incident",
            )

    def _repeated(self, kind: str, part: str, what: str, remedy: str) -> None:
        """
        Report state that the loop changes after the end of a step and before the next update
        window. An incident there may keep the change, and the loop then makes it once more.
        """
        self.findings.report(
            kind,
            part,
            f"{what}: {remedy}",
            inexact=f"{what}: an incident there may repeat or undo the change",
        )

    def _unended(self, part: str, where: str) -> None:
        """
        Report that the state has changed between two update windows, in a loop that does not mark
        the ends of its steps.

        The audit cannot know whether the loop sets `part` again at the start of each iteration, or
        has changed it after the window. An incident restores `part` in both cases, which undoes a
        change that was made after the window.
        """
        what = f"{_called(part)} changed {where}, and the loop does not say where its steps end"
        self.findings.report(
            "unended",
            part,
            f"{what}: an incident may undo the change. Take the steps from session.steps, or call "
            "session.end_step() as the last line of each iteration",
            inexact=f"{what}: code after the update window may be undone",
        )

    def _changed_after_collective(self, tail: _Tail, look: Look, line: str) -> None:
        for part in _changed(tail.first or {}, look):
            self.findings.report(
                "collective",
                part,
                f"the tail of step {tail.step} changes {_called(part)} after its collective "
                f"({tail.collective}) and before the step ends ({line}): if a rank is lost in "
                "that collective, some ranks have changed it and others cannot. Call the "
                "collective before the update window, and change this state in the window",
            )

    def _swallowed(self, failure: _Failure, *, leaves: bool) -> None:
        self._failure = None
        self._say_swallowed(failure, refuse=self.findings.strict)
        if (
            leaves
            # report the tail as interrupted at the collective: the code after the collective ran on
            # this rank, but perhaps not on the other ranks
        ):
            self._failure = failure
            raise _Cut

    def _say_swallowed(self, failure: _Failure, *, refuse: bool) -> None:
        said = shorten(f"{type(failure.error).__name__}: {failure.error}", 160)
        self.findings.report(
            "swallows",
            failure.line,
            f"the tail of step {failure.step} has hidden a fault from tft: a collective failed at "
            f"{failure.line} ({said}), and the loop caught the exception and went on. Let it leave "
            "`train`: tft calls `train` again after the incident",
            refuse=refuse,
            everywhere=True,
        )
        sentence = f"the tail of step {failure.step} has hidden a fault from tft at {failure.line}"
        if sentence not in self.findings.inexact:
            self.findings.inexact.append(sentence)

    # ---------------------------------------------------------------- reading the state

    def _look(self) -> Look | None:
        try:
            return {
                (shard, part): digest
                for shard in self._shards
                for part, digest in self._parts(shard).items()
            }
        # do not raise the error: the next code that needs the state will report it
        except Exception:
            log.warning("audit_ended", why="the state cannot be read", exc_info=True)
            self._readable = False
            return None

    def _glance(self) -> Look | None:
        """
        Return digests of what is small in the state, which costs little: settings, the scheduler, and
        small tensors in host memory. Return None if the state cannot be read.
        """
        step = self.position()[0]
        found: dict[tuple[str, str], str] = {}
        with suppress(Exception):  # the next code that needs the state will report it
            for shard in self._shards:
                given = self.hook.tft_give(shard=shard, step=step, kept=False)
                small = [
                    b for b in given.buffers if isinstance(b, Buffer) and len(b.view) <= _SMALL
                ]
                parts = part_digests(ShardPayload(meta=given.meta, buffers=tuple(small)))
                found |= {(shard, part): digest for part, digest in parts.items()}
            return found
        return None

    def _compares(self) -> bool:
        """
        Return True if the adaptor computes digests itself (`tft_compare`).

        Only these digests mark the parts of the state that the forward pass may change.
        """
        return bool(self.hook.tft_compare.get_hookimpls())

    def _parts(self, shard: str) -> Mapping[str, str]:
        if self._compares():
            parts: Mapping[str, str] = self.hook.tft_compare(shard=shard)
            return parts
        return part_digests(self.hook.tft_give(shard=shard, step=self.position()[0], kept=False))

    def _generators(self) -> Mapping[str, str]:
        return self.hook.tft_generators() or {}

    def _moved(self, before: Mapping[str, str]) -> list[str]:
        now = self._generators()
        return [name for name, was in before.items() if now.get(name) != was]

    def _watch(self, entered: Callable[[], None] | None) -> None:
        self.hook.tft_watch_collectives(entered=entered, failed=self.failed)

    def _entered(self) -> None:
        tail = self._tail
        if tail is None or tail.first is not None or threading.get_ident() != self._thread:
            return
        tail.first = tail.look if (look := self._look()) is None else look
        tail.collective = self._line()

    def _line(self) -> str:
        """
        Return the line of the user's loop at which the training thread is (FILE:LINE), or the words
        "the end of `train`" if the user's function has returned.
        """
        frame: FrameType | None = sys._getframe(1)
        found, below = None, None
        while frame is not None:
            if frame.f_code is self.loop:
                found = below
                break
            if not frame.f_code.co_filename.startswith(_OWN):
                below = frame
                found = found or frame
            else:
                below = None
            frame = frame.f_back
        return (
            "the end of `train`"
            if found is None
            else f"{found.f_code.co_filename}:{found.f_lineno}"
        )


class _Cut(Interrupted):
    """
    Raised at the end of a step if a collective failed after the update window because of an
    incident, and the script caught the exception of the collective and continued.
    """


def _changed(before: Look, after: Look) -> list[str]:
    """
    Return the names of the parts of the state whose digests differ between `before` and `after`.
    Leave out the parts that the forward pass may change.
    """
    return sorted(
        {
            part
            for shard, part in before.keys() | after.keys()
            if before.get((shard, part)) != after.get((shard, part))
            and before.get((shard, part), "-")
            and after.get((shard, part), "-")
        }
    )


def _list(parts: Sequence[str]) -> str:
    return ", ".join(map(_called, parts))


def _called(part: str) -> str:
    return _CALLED.get(part, f"{part!r}")


def _comes_from(error: BaseException | None, cause: BaseException) -> bool:
    """
    Return True if `error` is the exception `cause`, was raised from `cause`, or was raised while
    `cause` was handled.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if error is cause:
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False
