"""
The session: the part of a worker that runs on the training thread.

In `Session.run` the training thread either runs the user's `train` or carries out the orders of
an incident. It carries them out one by one, in the order in which the control thread passes them.
"""

import atexit
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from tft.checkpoint import CheckpointStore, checkpoint_store_of
from tft.clock import SystemClock
from tft.config import RankSettings, rank_settings, started_by_agent
from tft.core.rank.protocol import Done, Execute, Left
from tft.errors import Interrupted, JobEnded, UsageError
from tft.page import Page
from tft.plugins import check_complete, direct, load_adaptor, load_plugins
from tft.protocol.messages import (
    Complete,
    End,
    Faulted,
    FaultKind,
    Finished,
    Joined,
    OrderName,
    Ready,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    Save,
    Trained,
)
from tft.spi.types import Diagnosis, Made, ShardPayload
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls
from tft.worker.after import LIMIT, AfterStep, AfterSteps
from tft.worker.audit import Audit, Findings
from tft.worker.control import Control
from tft.worker.diagnosis import Diagnostician
from tft.worker.external_start import stand_aside, take_up
from tft.worker.launcher_bootstrap import become_launcher
from tft.worker.launchers import Launcher
from tft.worker.observers import Observers
from tft.worker.order_executor import Hands, Work
from tft.worker.periodic import Periodic
from tft.worker.process import started_ticks
from tft.worker.records import Records
from tft.worker.replica_groups import Holdings
from tft.worker.saving import Saving, own_functions
from tft.worker.step_gate import Gate

log = structlog.get_logger()


class UpdateWindow:
    """
    The update window: the context manager in which a rank changes its state in place.

    `Session.update` returns it.
    """

    __slots__ = ("_session",)

    def __init__(self, session: "Session") -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session.open_window()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:  # else the state is torn: the window stays open to mark that
            self._session.close_window()


class Session:
    """
    One rank's part in a fault-tolerant job.

    `init` creates the session. Use it on the training thread only.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._adaptor = load_adaptor(settings.adaptor)
        check_complete(self._adaptor, settings.adaptor)
        self._page = Page.open(settings.page)
        self._gate = Gate(self._adaptor.hook)
        self._control = Control(settings, self._gate)
        self._observers = Observers(load_plugins())
        self._window = UpdateWindow(self)
        check = partial(self._observers.check, self)
        self._saving = Saving(self._adaptor.hook)
        self._hands = Hands(self, self._gate, self._adaptor.hook, self._page, self._saving, check)
        self._diagnose = Diagnostician(self._classify, self._observers.device_faults()).diagnose
        self._tls = read_tls(settings.curve)
        self._server = ShardServer(settings.host, settings.job, self._give, self._tls)
        self._capture: Callable[..., bytes] = direct(self._adaptor.hook.tft_capture)
        self._share_out: Callable[[], None] | None = None
        if self._adaptor.hook.tft_updated.get_hookimpls():
            self._share_out = direct(self._adaptor.hook.tft_updated)
        self._periodic = Periodic(
            settings, self._adaptor.hook, self._saving, self._control.report, self.expect,
            self._gate.abandoned, self._hands.digests,
        )  # fmt: skip
        self._keeps_backups = bool(self._adaptor.hook.tft_backup.get_hookimpls())
        self._has_barrier = False
        """
        Whether ranks wait at the pre-update barrier before they complete a step: some shard is
        not on all ranks, and the adaptor has such a barrier.
        """
        self._note: Callable[..., bytes | None] | None = None
        if self._adaptor.hook.tft_end_step.get_hookimpls():
            self._note = direct(self._adaptor.hook.tft_end_step)
        self._tails = self._page.tailed()
        """Whether a step ends after its update window (with a tail), not with the window."""
        self._after = AfterSteps(self._adaptor.hook)
        self._records = Records(settings.run_dir, settings.rank)
        self._evaluating = False
        self._audit = self._make_audit()
        self._audited = self._audit
        """The audit of the present step; None while the step is not audited."""
        self._private = b""
        """The rank-local state when the last update window closed."""
        self._contributed = b""
        self._adopted = False
        self.model: Any = None  # Any: the object that the user's factory returned

    # ---------------------------------------------------------------- what the user sees

    @property
    def rank(self) -> int:
        """
        Global rank.
        """
        return self._settings.rank

    @property
    def successor(self) -> bool:
        """
        Whether this process was started as a successor: the process it replaces still trained then.
        """
        return self._settings.successor

    @property
    def world(self) -> int:
        """
        World size.
        """
        return self._settings.world

    @property
    def incarnation(self) -> int:
        """
        The number of processes that held this rank before this one: 0 for the first.
        """
        return self._settings.incarnation

    @property
    def run_dir(self) -> Path:
        """
        The run directory, in which this run keeps its records.
        """
        return self._settings.run_dir

    @property
    def checkpoints(self) -> CheckpointStore:
        """
        The store in which this run keeps its checkpoints.
        """
        return checkpoint_store_of(self._settings)

    @property
    def job(self) -> str:
        """
        The job's name.
        """
        return self._settings.job

    @property
    def tls(self) -> Tls | None:
        """
        The TLS settings of shard transfers; None: transfers are not encrypted.
        """
        return self._tls

    @property
    def adaptor(self) -> str:
        """
        The name of the adaptor in use.
        """
        return self._settings.adaptor

    @property
    def step(self) -> int:
        """
        The optimizer step that is being computed, counted from 1.
        """
        return self._gate.completed + 1

    @property
    def evaluating(self) -> bool:
        """
        Whether a function of `after_step` or `evaluate` runs now.

        That function is called after step `session.step - 1`.
        """
        return self._evaluating

    def adopt(self, *, wrap: Callable[[], Any] | None = None, **parts: Any) -> None:
        """
        Hand over the objects that make up the training state.

        `parts` are `model`, `optimizer`, and, if the script has them, `scheduler` and `data` (an
        object whose `state_dict()` is its position). `wrap` builds the wrapper around the model
        (`lambda: DDP(model)`). tft calls `wrap` at the start and after every incident, and keeps
        the result as `session.model`.

        `save(directory, step)` and `load(directory)` are optional. They write and read checkpoints
        in place of the adaptor, on the training thread and without process groups.

        Raises `UsageError` if the adaptor cannot handle one of the objects. `Any`: the framework's
        own types.
        """
        own = own_functions(parts)
        parts = {name: part for name, part in parts.items() if name not in ("save", "load")}
        self._adaptor.hook.tft_watch(contributing=self.contributing)
        self._adaptor.hook.tft_adopt(parts=parts, wrap=wrap)
        if own is not None:
            self._saving.give(own)
        self._periodic.check()
        self._adopted = True
        if "model" in parts:  # else the observers get the parts after the factory has made them
            self._observers.adopted(parts)

    def topology(self) -> Holdings:
        """
        Return the shards that this rank holds, each with all ranks that hold a copy of it.

        The adaptor reads them from the adopted objects. To print them: `print(session.topology())`.
        """
        shards = self._adaptor.hook.tft_shards(rank=self.rank, world=self.world)
        return Holdings(rank=self.rank, groups={each.shard: each.ranks for each in shards})

    def run(self, train: Callable[["Session"], None]) -> None:
        """
        Call `train(session)`, and call it again after every incident, from the agreed step.

        Returns when all ranks have finished. Raises `JobEnded` when the job ends before that.
        """
        self.begin()
        while (order := self.obey()) != "complete":
            if order == "resume" and self._inside(partial(self._train, train)):
                self._left(self._finished())

    def steps(self, last: int) -> Iterator[int]:
        """
        Yield the steps that remain to be computed, up to and including `last`.

        When the loop asks for the next step, the present step ends. Raises `UsageError` when a step
        ends without an update window.
        """
        self._has_tails()
        self._end_last_step()  # an earlier loop may have been left in the tail of its last step
        while self.step <= last:
            step = self.step
            if self._audited is not None:
                self._audited.step_begins()
            yield step
            if self.step == step:
                raise UsageError(
                    f"step {step} has ended without an update window: put the optimizer's step "
                    "into `with session.update():`"
                )
            self.end_step()

    def end_step(self) -> None:
        """
        Mark the end of the step, including its tail (the code of the loop after the update window).

        `session.steps` calls this. In a loop without `session.steps`, call it as the last line of
        each iteration. If a loop never calls it, each step ends with its update window. A fault
        after the window may then leave a tail that some ranks have executed and others have not.
        """
        if not self._tails:  # until now, this step counted as ended with its window
            self._has_tails()
            if self._note is not None:
                self._note(tail=True)
        self._end_last_step()

    def _has_tails(self) -> None:
        if not self._tails:
            self._tails = True
            self._page.has_tails()

    def update(self) -> UpdateWindow:
        """
        Return the update window: `with session.update(): optimizer.step()`.

        Put all code that changes the state in place into the window, and no all-reduce with other
        ranks. One window is one optimizer step.
        """
        return self._window

    def after_step(
        self, function: Callable[[int], object], *, every: int = 1, limit: float = LIMIT
    ) -> None:
        """
        Register `function(step)`, to be called when a step has ended: after every `every` steps.

        All ranks call it, replacements too. Register it before `run`. The function may use the
        process groups and may take `limit` seconds. It may draw random numbers: tft puts the
        generators back afterwards, so training is not affected. It must not change the state.

        If a fault occurs before all ranks have finished the function, all ranks call it again.
        Effects outside this process therefore happen at least once; use `step` to recognise a
        repetition.

        Raises `UsageError` if `function` is not callable or was registered before, or if `every` or
        `limit` is too small.
        """
        self._after.add(function, every, limit)

    def evaluate(
        self, function: Callable[[int], object], *, every: int, limit: float = LIMIT
    ) -> None:
        """
        Register an evaluation `function(step)`, with the same rules as `after_step`.

        All ranks may evaluate, or one rank while the others go on and wait for that rank. For
        `limit` seconds no rank counts as hanging. The handling of a fault on another rank waits
        until the evaluation has ended.
        """
        self._after.add(function, every, limit)

    def record(self, row: Mapping[str, object]) -> None:
        """
        Write a row for this step to `records-rank{rank}.jsonl` in the run directory.

        In the tail of a step, the row belongs to that step. The key `step` is added to the row. The
        file has the row once, even if the step is computed again or a function of `after_step` is
        called again.

        Call it before the last all-reduce of the step (with DDP: before `loss.backward()`). If this
        rank dies after its contribution, the other ranks complete the step without it, and a row
        that was to be written later is missing.

        Raises `UsageError` if the row has a key `step` or `after`, or is not serialisable as JSON.
        """
        self._records.write(self._gate.completed if self._gate.in_tail else self.step, row)

    def expect(self, seconds: float) -> None:
        """
        Announce a long phase, such as an evaluation or a checkpoint, of at most `seconds` seconds.

        No rank counts as hanging before `seconds` have passed.
        """
        self._page.train(True, self._clock.now() + seconds)

    def digests(self) -> Mapping[str, str]:
        """
        Return digests of parameters, optimizer, scheduler, RNG and data position.
        """
        digests: Mapping[str, str] = self._adaptor.hook.tft_digests()
        return digests

    # ---------------------------------------------------------------- a loop of the caller's own

    def begin(self) -> None:
        """
        Report this rank as ready to take orders, in a program that keeps its own loop.

        Call `obey` next. `run` does both itself. Raises `UsageError` if `adopt` was not called, or
        if the user's save and load cannot tell the shards of this rank apart.
        """
        if not self._adopted:
            raise UsageError("session.run needs something to keep: call session.adopt first")
        hook = self._adaptor.hook
        shards = hook.tft_shards(rank=self.rank, world=self.world)
        self._has_barrier = any(len(each.ranks) < self.world for each in shards) and bool(
            hook.tft_pre_update_barrier.get_hookimpls()
        )
        self._saving.check(shards)
        if self._audit is not None:
            self._audit.begin(each.shard for each in shards)
        self._control.report(
            Ready(
                rank=self.rank,
                incarnation=self.incarnation,
                shards=tuple(shards),
                column=tuple(hook.tft_column(rank=self.rank, world=self.world) or ()),
                strategies=tuple(hook.tft_strategies()),
                reloads=hook.tft_reload() is not None,
                after=self._after.limit,
                at=self._clock.now(),
            )
        )

    def obey(self) -> OrderName:
        """
        Wait for the next order, carry it out, and return its name.

        After `resume` this thread is in the loop: train the steps from `session.step` on, until
        `leave` or `finish`. After `complete` the job is complete.

        Raises `JobEnded` when the job ends before that.
        """
        while True:
            execute = self._gate.order()
            match execute.order:
                case Resume(again=again, tails=tails):
                    if tails:
                        self._has_tails()
                    self._control.tell(self._done(execute, self._clock.now()))
                    self._periodic.resumed((execute.order.incident, execute.order.round))
                    self._page.train(True, self._clock.now())
                    self._gate.enter()
                    if again and not self._inside(self._call_again):
                        continue
                case Complete():
                    self._control.tell(self._done(execute, self._clock.now()))
                case End(code=code):
                    self._control.tell(self._done(execute, self._clock.now()))
                    raise JobEnded(code)
                case _:
                    self._carry_out(execute)
            return execute.name

    def leave(self, error: BaseException | None = None) -> None:
        """
        Report that the program has left the loop.

        `error` is the exception that ended the loop, if that was not `Interrupted`: a fault. None:
        an incident interrupted the loop. Nothing may hold the frames of the loop any more.
        """
        self._audit_left(error)
        self._cut_off(None if error is None else self._fault(error))

    def finish(self) -> None:
        """
        Report that all steps have been trained.
        """
        self._end_last_step()
        self._periodic.finish()
        self._left(self._finished())

    # ---------------------------------------------------------------- the update window

    def open_window(self) -> None:
        """
        Open the update window: the all-reduces are complete, and the state may be changed.

        Waits here while an incident keeps the window closed. Raises `Interrupted` when an incident
        takes this rank out of the loop.
        """
        if self._gate.in_tail:
            self._end_step()  # the loop has not marked the end of the last step
        completed = self._gate.completed
        private = self._capture(closing=False)
        if private != self._contributed:  # else the page has this capture already
            self._page.capture(completed + 1, private, False)
        if self._audited is not None:
            self._audited.window_opens(completed + 1, tails=self._tails)
        met = not self._has_barrier or self._passes_barrier()
        self._page.move(completed, met, self._clock.now())
        if not met or not self._gate.arrive():
            self._wait_at_window()

    def close_window(self) -> None:
        """
        Close the update window: the state of the step is whole.

        If the loop has no tails, this also ends the step.
        """
        step = self._gate.completed + 1
        tail = self._tails
        self._private = self._capture(closing=True)
        self._page.capture(step, self._private, True)
        self._gate.passed(step, tail=tail)
        now = self._clock.now()
        self._page.move(step, False, now, tail=tail)
        if self._share_out is not None:
            self._share_out()
        if self._gate.announce:
            self._gate.announce = False
            self._control.report(
                Trained(rank=self.rank, incarnation=self.incarnation, step=step, at=now)
            )
        if self._observers.watch_windows:
            self._observers.window_closed(step)
        if self._audited is not None:
            self._audited.window_closed(step, tails=tail)
        if not tail:
            self._end_step()

    def _end_step(self) -> None:
        """
        End the step: the loop has done all its work of this step, as on the other ranks.

        Raises `Interrupted` when the rank is to leave the loop after this step.
        """
        step = self._gate.completed
        if self._audited is not None:
            self._end_audited(self._audited, step)
        if self._observers.watch_tails:
            self._observers.tail_ends(step)
        if self._note is not None:
            noted = self._note(tail=self._tails)
            if noted is not None:
                self._private = noted
                self._page.capture(step, noted, True)
        after = self._after.due(step)
        self._gate.ended(after=bool(after))
        self._page.end(step, after=bool(after))
        if self._keeps_backups:
            self._adaptor.hook.tft_backup(step=step)
        if self._periodic.due(step):
            self._periodic.stage(step, self._private)
        if self._gate.leaves(step):
            raise Interrupted
        if after:
            self._call(after, step)

    def _call(self, after: Sequence[AfterStep], step: int) -> None:
        """
        Call the functions that are due after this step, once the gate admits this rank.

        The calls count as one unit: either all of them have completed, or none.
        """
        if not self._gate.admits() and not self._goes_in(window=False):
            raise Interrupted
        self._records.begin_after(step)
        self._evaluating = True
        try:
            for each in after:
                self.expect(each.limit)
                self._after.call(each, step, self._hands.digests)
        finally:
            self._evaluating = False
        self._records.end_after()
        self._gate.ended(after=False)
        self._page.move(step, False, self._clock.now())
        if self._gate.leaves(step):
            raise Interrupted

    def _call_again(self) -> None:
        step = self._gate.completed
        self._records.drop_after(step)
        after = self._after.due(step)
        if after:
            self._gate.ended(after=True)
            self._page.move(step, False, self._clock.now(), after=True)
            self._call(after, step)

    def _end_audited(self, audit: Audit, step: int) -> None:
        audit.step_ends(step, leaves=self._gate.leaves(step))
        if audit.over:
            self._audited = None

    def _make_audit(self) -> Audit | None:
        if self._settings.audit == "off":
            return None
        return Audit(
            hook=self._adaptor.hook,
            findings=Findings(rank=self.rank, strict=self._settings.audit == "strict"),
            loop=Session._train.__code__,
            awake=self._wake_audit,
            position=lambda: (self._gate.completed, self._gate.in_tail),
        )

    def _wake_audit(self) -> None:
        self._audited = self._audit

    def _passes_barrier(self) -> bool:
        """
        Return whether all ranks have finished their all-reduces.

        If the barrier fails, that cannot be known any more. Ranks with other shards may complete
        the step, or may be unable to. This rank can do either: the fault is reported, and this rank
        waits at the window for the decision.
        """
        try:
            self._adaptor.hook.tft_pre_update_barrier()
        except Exception as error:  # noqa: BLE001 (any error: the all-reduces here are complete)
            self._control.report(self._fault(error))
            self._gate.stand()
            return False
        return True

    def contributing(self) -> None:
        """
        Capture the rank-local state; from now on the others can finish the step without this rank.

        The adaptor calls this in every step (see `tft_watch`).
        """
        self._contributed = self._capture(closing=False)
        self._page.capture(self._gate.completed + 1, self._contributed, False)

    def _wait_at_window(self) -> None:
        entered = self._goes_in(window=True)
        self._page.move(self._gate.completed, entered, self._clock.now())
        if not entered:
            raise Interrupted

    def _goes_in(self, *, window: bool) -> bool:
        """
        Wait until this rank may go on, and carry out orders meanwhile.

        Returns False if the rank must leave the loop. `window`: wait at an update window; else
        before the functions that are called after a step.
        """
        self._control.tell(self._gate.standing())
        while isinstance(word := self._gate.wait(window=window), Execute):
            self._carry_out(word)
        return word == "in"

    # ---------------------------------------------------------------- on the training thread

    def _train(self, train: Callable[["Session"], None]) -> None:
        if self._audited is not None:
            self._audited.entered()
        train(self)
        self._end_last_step()
        self._periodic.finish()

    def _inside(self, work: Callable[[], None]) -> bool:
        """
        Run `work`, which belongs to the loop.

        Returns False if an incident or a fault ended the loop in `work`.
        """
        message: Faulted | None = None
        line = ""
        try:
            work()
        except Interrupted as error:
            line = self._audit_left(error) or _line_below(error)
        except BaseException as error:  # noqa: BLE001 (any exception of the user's loop is a fault)
            message, line = self._fault(error), self._audit_left(error) or _line_below(error)
        else:
            return True
        # Here no traceback holds the frames of the loop any more, nor their process groups.
        self._cut_off(message, line)
        return False

    def _audit_left(self, error: BaseException | None) -> str:
        return "" if self._audit is None else self._audit.left(error)

    def _end_last_step(self) -> None:
        if self._gate.in_tail:
            self._end_step()

    def _finished(self) -> Finished:
        return Finished(
            rank=self.rank,
            incarnation=self.incarnation,
            step=self._gate.completed,
            at=self._clock.now(),
        )

    def _cut_off(self, message: Faulted | None, line: str = "") -> None:
        self._hands.interrupted(self.step, self._capture(closing=False), line)
        self._left(message)

    def _left(self, message: Faulted | Finished | None) -> None:
        self._gate.leave()
        self._periodic.left()
        self._page.train(False, self._clock.now())
        if message is not None:
            self._control.report(message)
        self._control.tell(Left(at=self._clock.now()))

    def _classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        """
        Return what the adaptor says of an exception. If the adaptor itself fails, log that: the
        exception of the script must not be replaced by it.
        """
        try:
            found: FaultKind | Diagnosis | None = self._adaptor.hook.tft_classify(error=error)
        except Exception:  # whatever it is, the exception of the script matters
            log.exception("classification_failed", error=repr(error))
            return None
        return found

    def _give(self, shard: str, step: int) -> ShardPayload:
        """
        Return a shard at the end of `step` for another rank (on a transfer thread).

        After an error the other rank tries the next holder. If the error shows that the device
        context of this rank is lost, report a fault too: no other process would notice that.
        """
        try:
            return self._hands.give(shard, step)
        except Exception as error:
            if self._diagnose(error).context_lost:
                self._control.report(self._fault(error))
            raise

    def _fault(self, error: BaseException) -> Faulted:
        diagnosis = self._diagnose(error)
        summary = traceback.format_exception_only(error)[-1].strip()
        return Faulted(
            rank=self.rank,
            incarnation=self.incarnation,
            kind=diagnosis.kind,
            polluted=diagnosis.polluted,
            not_after=diagnosis.not_after,
            context_lost=diagnosis.context_lost,
            step=self.step,
            summary=summary,
            traceback="".join(traceback.format_exception(error)),
            position=self._gate.position(),
            at=self._clock.now(),
        )

    def _carry_out(self, execute: Execute) -> None:
        began = self._clock.now()
        failure: str | None = None
        lost = False
        work = Work()
        try:
            heading = execute.order.step if isinstance(execute.order, Regroup) else self.step
            self._observers.order(execute.name, execute.order.incident, heading)
            if isinstance(execute.order, Rollback):
                self._periodic.rolled_back(execute.order.step)
                self._records.drop_later(execute.order.step)
            work = self._hands.carry_out(execute.order)
            self._tell_of_what_was_made(execute.order)
        except Exception as error:  # noqa: BLE001 (the failure of an order is answered, not raised)
            failure = f"{type(error).__name__}: {error}"
            lost = self._diagnose(error).context_lost
            log.warning("order_failed", order=execute.name, why=failure)
            if isinstance(execute.order, Save):
                work = self._hands.left_to_save()
        self._control.tell(self._done(execute, began, failure, work, context_lost=lost))

    def _tell_of_what_was_made(self, order: object) -> None:
        if isinstance(order, Rebuild) and isinstance(self.model, Made):
            made = self.model
            parts = {"model": made.model, "optimizer": made.optimizer, "scheduler": made.scheduler}
            self._observers.adopted(parts)

    def _done(
        self,
        execute: Execute,
        began: float,
        failure: str | None = None,
        work: Work = Work(),  # noqa: B008 (frozen)
        *,
        context_lost: bool = False,
    ) -> Done:
        return Done(
            order=execute.order,
            name=execute.name,
            failure=failure,
            context_lost=context_lost,
            position=self._gate.position(),
            held=self._gate.held(),
            backups=self._gate.backups(),
            files=work.files,
            verdict=work.verdict,
            finding=work.finding,
            private=work.private,
            digests=work.digests,
            compared=work.compared,
            line=work.line,
            odd=work.odd,
            inexact=() if self._audit is None else tuple(self._audit.inexact),
            tails=self._tails,
            began=began,
            at=self._clock.now(),
        )

    # ---------------------------------------------------------------- opening

    def open(self, at: float) -> Self:
        """
        Join the job.

        `at` is when `tft.init` was called (CLOCK_MONOTONIC, seconds). Raises `RankTaken` when
        another process holds this rank.
        """
        self._page.move(0, False, at)
        self._page.train(False, at)
        self._server.start()
        pid, started = started_ticks()
        joined = Joined(
            rank=self.rank,
            incarnation=self.incarnation,
            world=self.world,
            pid=pid,
            started=started,
            host=self._settings.host,
            address=self._server.address,
            adaptor=self._settings.adaptor,
            strategies=tuple(self._adaptor.hook.tft_strategies()),
            derives=bool(self._adaptor.hook.tft_derive.get_hookimpls()),
            at=at,
        )
        self._control.start(joined)
        atexit.register(self._close)
        self._observers.opened(self)
        return self

    def _close(self) -> None:
        self._periodic.close()
        self._control.close()
        self._server.close()


def _line_below(error: BaseException) -> str:
    """
    Return the line (FILE:LINE) at which the exception left the user's function called in this file.

    Empty if no frame of the user is in the traceback.
    """
    trace = error.__traceback__
    own = _line_below.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


_session: Session | None = None


def init(launcher: Launcher | None = None, options: Sequence[str] = ()) -> Session:
    """
    Join the job for which this process was started, and return its session.

    Later calls return the same session. If torchrun, srun or another launcher has started this
    process, `init` does not return: the process becomes a `tft run`, whose rank runs the script
    from its beginning. `launcher` gives the rank and place of this process if the environment does
    not name them. `options` are additional options of that `tft run`.

    Raises `UsageError` if the process cannot become a `tft run`, or if it was not started as one
    process of a job.
    """
    global _session
    if _session is None:
        at = SystemClock().now()
        if not started_by_agent():
            stand_aside()
            become_launcher(launcher, options)
        take_up()
        _session = Session(rank_settings()).open(at)
    return _session
