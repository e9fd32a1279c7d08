"""
The steps of the training loop: update windows, tails, and the functions that are called after a
step. All code of this module runs on the training thread.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

import pluggy
import structlog

from tft.clock import SystemClock
from tft.config import RankSettings
from tft.core.rank.protocol import Execute
from tft.errors import Interrupted, UsageError
from tft.page import Page
from tft.plugins import direct
from tft.protocol.messages import Faulted, ShardCopies, Trained
from tft.spi.faults import TrainingFault
from tft.spi.types import Numbers
from tft.worker.after import AfterPhase, AfterStep
from tft.worker.audit import Audit, Findings
from tft.worker.control import Control
from tft.worker.digest_records import DigestRecords
from tft.worker.observers import Observers
from tft.worker.periodic import Periodic
from tft.worker.refusal import UpdateRefused, step_numbers
from tft.worker.step_gate import Gate

log = structlog.get_logger()

_CLOCK = SystemClock()

_COPYING = 600.0
"""Seconds that a copy in host memory may take before the training thread counts as hanging."""


class UpdateWindow:
    """
    The update window: the context manager in which a rank changes its state in place.

    `Session.update` returns it.
    """

    __slots__ = ("_loop",)

    def __init__(self, loop: "StepLoop") -> None:
        self._loop = loop

    def __enter__(self) -> None:
        self._loop.open_window()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # after an exception do not close the window: an open window marks the state as incomplete
        if kind is None:
            self._loop.close_window()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepHooks:
    """
    The hooks of the adaptor that are called in every step. A hook that the adaptor does not have is
    None.
    """

    capture: Callable[..., bytes]
    opening: Callable[[], None] | None
    updated: Callable[[], None] | None
    end_step: Callable[..., bytes | None] | None
    backup: Callable[..., Callable[[], None] | None] | None
    barrier: Callable[..., bool | None] | None
    synchronize: Callable[..., None] | None
    watch_numbers: Callable[..., bool] | None
    numbers: Callable[[], Numbers] | None
    watch_collectives: Callable[..., None] | None


def step_hooks(hook: pluggy.HookRelay) -> StepHooks:
    """
    Return the hooks of an adaptor that are called in every step.
    """

    def present(caller: pluggy.HookCaller) -> pluggy.HookCaller | None:
        return caller if caller.get_hookimpls() else None

    return StepHooks(
        capture=direct(hook.tft_capture),
        opening=direct(hook.tft_opening) if present(hook.tft_opening) else None,
        updated=direct(hook.tft_updated) if present(hook.tft_updated) else None,
        end_step=direct(hook.tft_end_step) if present(hook.tft_end_step) else None,
        backup=present(hook.tft_backup),
        barrier=present(hook.tft_pre_update_barrier),
        synchronize=present(hook.tft_synchronize),
        watch_numbers=present(hook.tft_watch_numbers),
        numbers=direct(hook.tft_numbers) if present(hook.tft_numbers) else None,
        watch_collectives=present(hook.tft_watch_collectives),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EdgeWaits:
    """
    The hooks that are called at the beginning and end of an update window. A hook is None if this
    job does not need it.
    """

    barrier: Callable[..., bool | None] | None = None
    """The barrier at which all ranks meet before an update window opens. It is needed if some shard
    is not on all ranks, if collectives are asynchronous, or if a rank that refuses an update cannot
    show this to the other ranks through NaN gradients."""
    synchronize: Callable[..., None] | None = None
    """Waits for the device. It is needed if the device carries out collectives asynchronously."""
    numbers: Callable[[], Numbers] | None = None
    """Reads the numbers of the step (losses, gradient norm), which an observer of a plugin
    judges."""


class _LastStep(BaseException):
    """
    Raised at the end of the last step that the settings allow (`last_step`), to leave a loop that
    does not take its steps from `Session.steps`.
    """


@dataclass(slots=True)
class _Present:
    """
    What this rank knows about the present step: the last captures of its rank-local state, how the
    loop ends its steps, and the numbers of the step.
    """

    step: int = -1
    """The step for which `contributed` was captured. -1: nothing was captured since the start or
    the last rollback.
    """
    contributed: bytes = b""
    """The rank-local state that was captured when this rank contributed to the last all-reduce of
    the step."""
    closed: bytes = b""
    """The rank-local state that was captured when the last update window closed."""
    tails: bool = False
    """True if a step ends later than its update window, so that it has a tail."""
    yields: bool = False
    """True if the loop takes its steps from `steps`, which stops after the last step."""
    iteration: int = 0
    """The step of the present iteration over `steps`. 0: there is no such iteration now."""
    numbers: Numbers | None = None
    """The numbers (losses, gradient norm) of the step whose update window opened last. None if no
    observer judges them."""
    refused_loss: str = ""
    """Why an observer has refused a loss of the step that is being computed. Empty if no observer
    has."""
    failure: BaseException | None = None
    """The exception of a collective that has failed since the last step ended, or None."""
    again: Audit | None = None
    """The audit, if the user's function was called again and its first step has not begun."""
    copied: Callable[[], None] | None = None
    """A function that waits until the copy of the last step in host memory is complete. None if no
    copy is being made."""


@dataclass(slots=True, kw_only=True, eq=False)
class StepLoop:
    """
    The steps of one rank's training loop.

    `fault(error)` makes the report of a fault. `carry_out` carries out an order that arrives while
    the rank waits at an update window.
    """

    settings: RankSettings
    page: Page
    gate: Gate
    control: Control
    hooks: StepHooks
    observers: Observers
    periodic: Periodic
    after: AfterPhase
    fault: Callable[[BaseException], Faulted]
    carry_out: Callable[[Execute], None]
    audit: Audit | None = None
    """The audit of the loop, or None if the audit is off."""
    _audited: Audit | None = None
    """The audit, while the present step is audited; otherwise None."""
    _edges: _EdgeWaits = field(default_factory=_EdgeWaits)
    digests: DigestRecords | None = None
    """Writes the digests of every step. None if digests are not recorded."""
    _present: _Present = field(default_factory=_Present)

    def __post_init__(self) -> None:
        self._present.tails = self.page.tailed()

    @property
    def tails(self) -> bool:
        """
        True if a step ends later than its update window, so that it has a tail.
        """
        return self._present.tails

    @property
    def step(self) -> int:
        """
        The optimizer step that is being computed, counted from 1.
        """
        return self.gate.completed + 1

    @property
    def inexact(self) -> tuple[str, ...]:
        """
        Sentences that say why a recovery is not bit-identical on this rank.
        """
        return () if self.audit is None else tuple(self.audit.inexact)

    @property
    def audited(self) -> bool:
        """
        True if the present step is audited.
        """
        return self._audited is not None

    def unkept(self, what: str, sentence: str) -> None:
        """
        Report a part of the state that changes while training and that the adaptor neither saves
        nor restores, unless the audit is off.
        """
        if self.audit is not None:
            self.audit.unkept(what, sentence)

    def watch(self, hook: pluggy.HookRelay) -> None:
        """
        Begin the audit of the loop, unless the settings disable it.
        """
        if self.settings.audit == "off":
            return
        strict = self.settings.audit == "strict"
        self.audit = self._audited = Audit(
            hook=hook,
            findings=Findings(rank=self.settings.rank, strict=strict),
            loop=StepLoop.train.__code__,
            failed=self._failed,
            awake=self._wake_audit,
            position=lambda: (self.gate.completed, self.gate.in_tail),
        )

    def begin(self, shards: Sequence[ShardCopies], *, asynchronous: bool) -> None:
        """
        Record the shards that this rank holds, and whether its device carries out collectives
        asynchronously, after their calls have returned. Called before the first step.

        Raises `UsageError` if a plugin judges the numbers of each step (losses, gradient norm) and
        the adaptor cannot read these numbers.
        """
        shared_by_all = all(len(each.ranks) == self.settings.world for each in shards)
        watches = self.observers.watch_numbers
        carried = not watches or self._watch_numbers()
        waits = asynchronous or not shared_by_all or not carried
        self._edges = _EdgeWaits(
            barrier=self.hooks.barrier if waits else None,
            synchronize=self.hooks.synchronize if asynchronous else None,
            numbers=self.hooks.numbers if watches else None,
        )
        if self.hooks.watch_collectives is not None:
            self.hooks.watch_collectives(entered=None, failed=self._failed)
        if self.audit is not None:
            self.audit.begin(each.shard for each in shards)

    def watch_work(self, hook: pluggy.HookRelay) -> None:
        """
        Let the adaptor tell when this rank begins a forward pass and how long it waits, if a plugin
        has asked for the times of steps.
        """
        if self.observers.work is not None:
            self.observers.work.meter = hook.tft_watch_work(computing=self.observers.work.computing)

    def _watch_numbers(self) -> bool:
        """
        Let the adaptor record the numbers (losses, gradient norm) of each step. Return True if the
        adaptor makes the gradients NaN on all ranks when one rank refuses a loss, so that all ranks
        notice the refusal without a barrier.
        """

        def refuse(loss: float) -> bool:
            # a backward pass after the update window of a step, or in a function that is called
            # after a step, is not part of training
            trains = not self.gate.in_tail and not self.after.running
            refused = trains and self.observers.loss(self.step, loss)
            if refused:
                self._present.refused_loss = f"the loss {loss} is refused"
            return refused

        if self.hooks.watch_numbers is None or self.hooks.numbers is None:
            raise UsageError(
                "a plugin judges the numbers of each step (loss, gradient norm), but the adaptor "
                f"{self.settings.adaptor!r} does not know them: run without --numerics"
            )
        carried = self.hooks.watch_numbers(refuse=refuse)
        if not carried and self.hooks.barrier is None:
            raise UsageError(
                f"the adaptor {self.settings.adaptor!r} cannot tell all ranks that one of them "
                "refuses an update: run without --numerics"
            )
        return carried

    def train(self, function: Callable[[], None]) -> None:
        """
        Call the user's function, and then end its last step.
        """
        self._present.failure = None
        self._present.again = None
        if self.audit is not None and self.audit.entered(audited=self._audited is not None):
            self._present.again = self.audit
        if self.observers.work is not None:
            self.observers.work.forget()
        if self.digests is not None:
            self.digests.step_begins()
        try:
            function()
        except _LastStep:
            log.info("last_step", step=self.gate.completed)
        self.finish()

    def attempt(self, work: Callable[[], None]) -> None:
        """
        Call `work`, a part of a training loop that belongs to another program. `work` is left when
        the last step that the settings allow has ended.
        """
        self._present.failure = None
        if self.digests is not None:
            self.digests.step_begins()
        with suppress(_LastStep):
            work()

    @property
    def over(self) -> bool:
        """
        True if the last step that the settings allow (`last_step`) is complete.
        """
        return 0 < self.settings.last_step <= self.gate.completed

    def finish(self) -> None:
        """
        End the last step, and wait until this rank has made its last copy of the state in host
        memory, and has written its part of the last checkpoint.
        """
        self.end_last_step()
        self._await_copy()
        step = self.gate.completed
        self.periodic.finish(step, self.page.local_states().get(step))

    def left(self, error: BaseException | None) -> str:
        """
        Record that the loop has ended. `error` is the exception that ended it, or None if an
        incident interrupted a program that does not use `Session.run`. If the audit knows that the
        tail of a step (the code after its update window) was interrupted, return the line of the
        interruption (FILE:LINE), otherwise an empty text.
        """
        self._present.refused_loss = ""
        if self.observers.work is not None:
            self.observers.work.forget()
        return "" if self.audit is None else self.audit.left(error)

    def expect(self, seconds: float) -> None:
        """
        Announce that the training thread will show no progress for `seconds` seconds.
        """
        self.page.train(True, _CLOCK.now() + seconds)

    # ---------------------------------------------------------------- begin and end of a step

    def steps(self, last: int) -> Iterator[int]:
        """
        Yield the steps that remain to be computed, up to and including `last`. Raises `UsageError`
        when a step ends without an update window.
        """
        self.has_tails()
        self._present.yields = True
        last = min(last, self.settings.last_step or last)
        # an earlier loop over `steps` may have been left in the tail of its last step, so end that
        # step first
        self.end_last_step()
        if self._audited is not None:
            self._audited.loop_begins()
        try:
            while self.step <= last:
                self._present.iteration = step = self.step
                if self._present.again is not None:
                    self._present.again.first_step(step)
                    self._present.again = None
                if self._audited is not None:
                    self._audited.step_begins()
                yield step
                if self.step == step:
                    raise UsageError(
                        f"step {step} has ended without an update window, in which the optimizer "
                        "must change the state: call the optimizer within `with session.update():`"
                    )
                self.end_step()
        finally:
            self._present.iteration = 0

    def end_step(self) -> None:
        """
        End the step. The loop calls this method after the tail of the step (its code after the
        update window).
        """
        if not self.tails:  # first call: so far each step counted as ended with its window
            self.has_tails()
            self._warn_of_tail(self.gate.completed)
            if self.hooks.end_step is not None:
                self.hooks.end_step(tail=True)
        self.end_last_step()

    def _warn_of_tail(self, step: int) -> None:
        """
        Log that what was due after `step` was done before the tail of the step, because it was not
        known before that the loop marks the ends of its steps.
        """
        if step and (self.after.due(step) or self.periodic.due(step)):
            log.warning(
                "tail_not_known",
                step=step,
                why="functions after this step, or its checkpoint, came before the tail of the step: "
                "call session.end_step() once before the first step",
            )

    def has_tails(self) -> None:
        """
        Record that the loop marks the ends of its steps, so that each step has a tail (the code
        between its update window and its end).
        """
        if not self.tails:
            self._present.tails = True
            self.page.has_tails()

    def end_last_step(self) -> None:
        """
        End the last step if the loop is still in its tail (the code after its update window).
        """
        if self.gate.in_tail:
            self._end_step()

    def refuse_after_abort(self) -> None:
        """
        Raise `Interrupted` if collectives of this step were aborted on the device: what the loop
        has read since then may be wrong.
        """
        if self._edges.synchronize is not None and self.gate.aborted:
            raise Interrupted

    def synchronize(self) -> None:
        """
        Wait until the device has done its work. Raises an exception if a collective may have been
        aborted, because the result of an aborted collective is wrong.
        """
        if self._edges.synchronize is not None:
            self._edges.synchronize(closing=True)

    def contributing(self) -> None:
        """
        Write the rank-local state to the page (the memory that the agent reads), because from now
        on the other ranks can finish the step without this rank. If they do, a process that
        replaces this one needs that state.

        The adaptor calls this in every step, perhaps more than once (see `tft_watch`).
        """
        present, step = self._present, self.gate.completed + 1
        local_state = self.hooks.capture(closing=False)
        if step == present.step:
            if local_state == present.contributed:
                return  # an earlier call in this step has written the same state to the page
            self.page.varies()
        present.step, present.contributed = step, local_state
        self.page.capture(step, local_state, False)
        self._ring()

    def _ring(self) -> None:
        """
        Wake the agent through its pipe (the bell), so that the agent sends the captures to another
        node at once. A job with one node has no such pipe.
        """
        if self.settings.bell is not None:
            # ignore errors: a full pipe wakes the agent as well, and if the agent has ended, this
            # process ends too
            with suppress(OSError):
                os.write(self.settings.bell, b"!")

    def open_window(self) -> None:
        """
        Open the update window: the all-reduces are complete, and the state may be changed.

        Waits here while an incident keeps the window closed. Raises `Interrupted` when an incident
        takes this rank out of the loop. Raises `UpdateRefused` if this rank or another rank refuses
        the update, and `UsageError` if no fault could be repaired after it.
        """
        # end the previous step first, in case the loop has not marked its end
        self.end_last_step()
        self._stop_after_last()
        if self._present.failure is not None:
            self._raise_swallowed(self._present.failure)
        if self.observers.work is not None:
            self.observers.work.arrives()
        if self._edges.synchronize is not None:
            self._edges.synchronize(closing=False)
        if self.hooks.opening is not None:
            self.hooks.opening()
        completed = self.gate.completed
        local_state = self.hooks.capture(closing=False)
        # write the rank-local state to the page only if it has changed since the last capture:
        # otherwise the page has it already
        if local_state != self._present.contributed:
            self.page.varies()
            self.page.capture(completed + 1, local_state, False)
            self._ring()
        if self._audited is not None:
            self._audited.window_opens(completed + 1, tails=self.tails)
            if 0 < self._present.iteration <= completed:
                self._audited.further_window(completed + 1)
        if self.observers.watch_releases:
            self.observers.state_released()
        refusal = None if self._edges.numbers is None else self._refusal(self._edges.numbers())
        met = self._edges.barrier is None or self._passes_barrier(self._edges.barrier, refusal)
        if refusal is not None:
            raise refusal
        self._await_copy()
        counts = self.settings.bell is not None and self.page.opens()
        self.page.move(completed, met, _CLOCK.now())
        if counts:
            self._ring()
        if not met or not self.gate.arrive():
            self._wait_at_window()
        if self.observers.work is not None:
            self.observers.work.opens()

    def _failed(self, error: BaseException, raised: bool) -> None:
        """
        Record that a collective has failed. Called on any thread. `raised` is True if the calling
        thread raises `error` now.
        """
        if not self.gate.in_tail:
            known = self._present.failure
            if known is None or self.fault(known).kind == "software":
                self._present.failure = error
        elif raised and self.audit is not None:
            self.audit.collective_failed(self.gate.completed, error)

    def _raise_swallowed(self, error: BaseException) -> None:
        """
        Raise a fault because a collective of this step has failed with `error`. The script has
        caught the exception and come to the update window, so the gradients may not be reduced. Do
        nothing if `error` is an error of the script.

        Raises `Interrupted` if an incident takes this rank out of the loop anyway.
        """
        if self.gate.aborted:
            raise Interrupted
        self._present.failure = None
        if self.fault(error).kind != "software":
            raise TrainingFault(
                f"a collective of step {self.step} has failed, and the script has caught the "
                "exception and continued: let the exception leave the training loop"
            ) from error

    def _changed_late(self, step: int) -> None:
        """
        Record on the page (the shared memory of the rank) that the rank-local state of `step`
        differs from the capture that was made before the all-reduces of the step, and wake the
        agent. The earlier capture is then not the state of the end of the step.
        """
        self.page.changes_late(step)
        self._ring()

    def close_window(self) -> None:
        """
        Close the update window: the state of the step is complete.

        If the loop has no tails, this also ends the step.
        """
        self.synchronize()
        step = self.gate.completed + 1
        tail = self.tails
        if self.observers.work is not None:
            self.observers.work.closes(step)
        self._present.closed = self.hooks.capture(closing=True)
        self.page.capture(step, self._present.closed, True)
        if self.settings.bell is not None and self._present.closed != self._present.contributed:
            self._changed_late(step)
        self.gate.passed(step, tail=tail)
        now = _CLOCK.now()
        self.page.move(step, False, now, tail=tail)
        if self.hooks.updated is not None:
            self.hooks.updated()
        if self.gate.announce:
            self.gate.announce = False
            rank, incarnation = self.settings.rank, self.settings.incarnation
            numbers = None if self._present.numbers is None else step_numbers(self._present.numbers)
            self.control.report(
                Trained(rank=rank, incarnation=incarnation, step=step, numbers=numbers, at=now)
            )
        if self.observers.watch_windows:
            self.observers.window_closed(step)
        if self._audited is not None:
            self._audited.window_closed(step, tails=tail)
        if self.digests is not None:
            self.digests.window_closed(step, self._present.closed)
        if not tail:
            self._end_step()

    def _end_step(self) -> None:
        """
        End the step: the loop has done all its work of this step.

        Raises `Interrupted` when the rank must leave the loop after this step.
        """
        step = self.gate.completed
        if self.tails:
            self.synchronize()
        if self._audited is not None:
            self._end_audited(self._audited, step)
        if self.observers.watch_tails:
            self.observers.tail_ends(step)
        if self.hooks.end_step is not None:
            noted = self.hooks.end_step(tail=self.tails)
            if noted is not None:
                self._present.closed = noted
                self.page.capture(step, noted, True)
                self._changed_late(step)
        if self.digests is not None:
            self.digests.step_ended(step, self._present.closed)
        after = self.after.due(step)
        self.gate.ended(after=bool(after))
        self.page.end(step, after=bool(after))
        if self.observers.watch_ends:
            self.observers.step_ended(step)
        if self._backs_up(step):
            self._back_up(step)
        if self.periodic.due(step):
            self.periodic.stage(step, self._present.closed)
        if self.gate.leaves(step):
            raise Interrupted
        if after:
            self._call(after, step)
        if self.observers.work is not None:
            self.observers.work.step_begins()
        self._stop_after_last()

    # ---------------------------------------------------------------- copies in host memory

    def check_backups(self) -> None:
        """
        Raise `UsageError` if copies in host memory are wanted and the adaptor cannot keep any.
        """
        if self.settings.backup_every and self.hooks.backup is None:
            raise UsageError(
                f"the adaptor {self.settings.adaptor!r} cannot keep copies of the state in host "
                "memory: start the job without --backup-every"
            )

    def rolled_back(self, step: int) -> None:
        """
        Record that this rank has gone back to its rank-local state of the end of `step`.

        If copies of the rest of the state at the end of `step` are kept in host memory, the page
        (its shared memory) must keep this rank-local state as long as these copies. The page may
        not have kept it yet: the page may be new, or the rank-local state may have been derived
        from the number of the step.
        """
        self._present.step = -1
        if self._backs_up(step):
            self.page.keep(step, self.page.local_states()[step], self.gate.backups())

    def _backs_up(self, step: int) -> bool:
        every = self.settings.backup_every
        return every > 0 and step % every == 0

    def _back_up(self, step: int) -> None:
        """
        Let the adaptor copy the state at the end of `step` to host memory.

        From now on the page (the shared memory of the rank) keeps the rank-local state of this
        step, even if the copy fails. If other ranks have a copy, another process of this rank may
        fetch that copy, and needs the rank-local state of the same step.
        """
        self.page.keep(step, self._present.closed, self.gate.backups())
        if self.hooks.backup is not None:
            self._present.copied = self.hooks.backup(
                step=step,
                sound=self.control.compared.sound(step),
                copies=self.control.compared.copies(self.settings.backup_every),
            )

    def _await_copy(self) -> None:
        """
        Wait until the copy of the last step in host memory is complete. Called before the state may
        change.
        """
        copied, self._present.copied = self._present.copied, None
        if copied is not None:
            self.expect(_COPYING)
            copied()
            self.expect(0.0)
            self.page.keeps(max(self.gate.backups(), default=0))

    def _stop_after_last(self) -> None:
        """
        Leave the loop after the last step that the settings allow (`last_step`). A loop over
        `steps` is not left here, because `steps` itself ends after that step.
        """
        if self.over and not self._present.yields:
            raise _LastStep

    def _end_audited(self, audit: Audit, step: int) -> None:
        audit.step_ends(step, leaves=self.gate.leaves(step))
        if audit.over:
            self._audited = None

    def _wake_audit(self) -> None:
        self._audited = self.audit

    # ---------------------------------------------------------------- functions after a step

    def call_again(self) -> None:
        """
        Call the functions that are due after the last completed step once more, because an incident
        interrupted them on some rank. All ranks call them again.
        """
        step = self.gate.completed
        self.after.drop_records(step)
        after = self.after.due(step)
        if after:
            self.gate.ended(after=True)
            self.page.move(step, False, _CLOCK.now(), after=True)
            self._call(after, step)

    def _call(self, after: Sequence[AfterStep], step: int) -> None:
        """
        Call the functions that are due after this step, as soon as the gate allows it. The gate
        makes this rank wait during an incident.

        The calls count as one unit: if an incident interrupts one of the functions, all of them are
        called again.
        """
        if not self.gate.admits() and not self._goes_in(window=False):
            raise Interrupted
        self._await_copy()
        self.observers.state_released()
        self.after.call(after, step, self.expect, self.synchronize)
        if self.digests is not None:
            self.digests.called_after(step, [each.name for each in after])
        self.gate.ended(after=False)
        self.page.move(step, False, _CLOCK.now())
        if self.gate.leaves(step):
            raise Interrupted

    # ---------------------------------------------------------------- waiting

    def _refusal(self, numbers: Numbers) -> UpdateRefused | None:
        """
        Return the refusal of the update by an observer (an object of a plugin) of this rank, or
        None if no observer refuses the update.
        """
        self._present.numbers = numbers
        refused_loss, self._present.refused_loss = self._present.refused_loss, ""
        # a refused loss counts even if the observer does not refuse the numbers now: the gradients
        # are NaN on all ranks already
        why = self.observers.refusal(self.step, numbers) or refused_loss
        return UpdateRefused(why, numbers) if why else None

    def _passes_barrier(
        self, barrier: Callable[..., bool | None], refusal: UpdateRefused | None
    ) -> bool:
        """
        Wait at the barrier before an update window. Return True if all ranks have finished the
        all-reduces of the step. `refusal` is the refusal of the update by this rank, or None.
        Raises `UpdateRefused` if another rank refuses the update.

        If the barrier fails, it is unknown whether ranks with other shards can complete the step.
        Then this rank reports the fault, returns False, and must wait at the window for the
        decision of the controller.
        """
        numbers = self._present.numbers
        try:
            refused = barrier(refuses=None if numbers is None else refusal is not None)
        except Exception as error:  # noqa: BLE001 (whatever failed, the barrier has failed)
            if refusal is not None:
                # this rank refuses the update, and no other rank can pass the barrier without the
                # consent of this rank: so nothing needs to be reported
                return False
            self.control.report(self.fault(error))
            self.gate.stand()
            return False
        if refused and refusal is None and numbers is not None:
            raise UpdateRefused(f"another rank refuses the update of step {self.step}", numbers)
        return True

    def _wait_at_window(self) -> None:
        entered = self._goes_in(window=True)
        self.page.move(self.gate.completed, entered, _CLOCK.now())
        if not entered:
            raise Interrupted

    def _goes_in(self, *, window: bool) -> bool:
        """
        Wait until this rank may continue, and carry out orders meanwhile.

        Returns False if the rank must leave the loop. If `window` is True, the rank waits at an
        update window; if False, before the functions that are called after a step.
        """
        self.control.tell(self.gate.standing())
        while isinstance(word := self.gate.wait(window=window), Execute):
            self.carry_out(word)
        return word == "in"
