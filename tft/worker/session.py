"""
The session: the training thread's half of a worker.

`Session.run` keeps the training thread either in the user's `train` or at work on the orders of
an incident, one after another, in the order in which the control thread hands them over.
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
from tft.core.rank_protocol import Done, Execute, Left
from tft.errors import Interrupted, JobEnded, UsageError
from tft.hooks import Diagnosis, Made, ShardPayload
from tft.page import Page
from tft.plugins import direct, load_adaptor, load_plugins
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
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls
from tft.worker.after import LIMIT, AfterStep, AfterSteps
from tft.worker.audit import Audit
from tft.worker.control import Control
from tft.worker.diagnosis import Diagnostician
from tft.worker.foreign import become_launcher
from tft.worker.gate import Gate
from tft.worker.holdings import Holdings
from tft.worker.launchers import Launcher
from tft.worker.observers import Observers
from tft.worker.orders import Hands, Work
from tft.worker.periodic import Periodic
from tft.worker.process import started_ticks
from tft.worker.records import Records
from tft.worker.saving import Saving, own_functions
from tft.worker.started import stand_aside, take_up

log = structlog.get_logger()


class UpdateWindow:
    """
    What `Session.update` returns: the span in which a rank changes its state in place.
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
        if kind is None:  # else the state is torn, and the window stays open to say so
            self._session.close_window()


class Session:
    """
    One rank's part in a fault-tolerant job. Made by `init`; used on the training thread.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        self._adaptor = load_adaptor(settings.adaptor)
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
        """No rank holds everything: they make sure of each other before a step is completed."""
        self._note: Callable[..., bytes | None] | None = None
        if self._adaptor.hook.tft_end_step.get_hookimpls():
            self._note = direct(self._adaptor.hook.tft_end_step)
        self._tails = self._page.tailed()
        """Steps end behind their windows."""
        self._after = AfterSteps(self._adaptor.hook)
        self._records = Records(settings.run_dir, settings.rank)
        self._evaluating = False
        self._audit = self._make_audit()
        self._audited = self._audit
        """What looks at the present step; None: nobody does, and nobody is asked."""
        self._private = b""
        """As it was when the last window closed."""
        self._contributed = b""
        self._adopted = False
        self.model: Any = None  # Any: whatever the user's factory returned

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
        Whether this process was started to take over from one that still trained then.
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
        How many processes held this rank before this one.
        """
        return self._settings.incarnation

    @property
    def run_dir(self) -> Path:
        """
        Where this run keeps its records.
        """
        return self._settings.run_dir

    @property
    def checkpoints(self) -> CheckpointStore:
        """
        Where its checkpoints are.
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
        What transfers are encrypted with; None: they are not.
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
        The optimizer step being computed, 1-based.
        """
        return self._gate.completed + 1

    @property
    def evaluating(self) -> bool:
        """
        Whether a function that is called after a step runs: it is called after step `session.step - 1`.
        """
        return self._evaluating

    def adopt(self, *, wrap: Callable[[], Any] | None = None, **parts: Any) -> None:
        """
        Hands over what makes up the training state: `model`, `optimizer`, and if there are any
        `scheduler` and `data` (an object whose `state_dict()` is its position). `wrap` builds the
        wrapper round the model (`lambda: DDP(model)`); it is called at the start and after every
        incident, and what it returns is `session.model`.

        `save(directory, step)` and `load(directory)`, if they are given, write and read checkpoints in
        the place of the adaptor, on the training thread and without process groups.

        Raises `UsageError` for what the adaptor cannot handle. `Any`: the framework's own types.
        """
        own = own_functions(parts)
        parts = {name: part for name, part in parts.items() if name not in ("save", "load")}
        self._adaptor.hook.tft_watch(contributing=self.contributing)
        self._adaptor.hook.tft_adopt(parts=parts, wrap=wrap)
        if own is not None:
            self._saving.give(own)
        self._periodic.check()
        self._adopted = True
        if "model" in parts:  # else they are told when it is made
            self._observers.adopted(parts)

    def topology(self) -> Holdings:
        """
        The shards this rank holds, each with all ranks that hold a copy of it, as read from what was
        adopted: `print(session.topology())`.
        """
        shards = self._adaptor.hook.tft_shards(rank=self.rank, world=self.world)
        return Holdings(rank=self.rank, groups={each.shard: each.ranks for each in shards})

    def run(self, train: Callable[["Session"], None]) -> None:
        """
        Calls `train(session)`, and calls it again from the agreed step after every incident.
        Returns when all ranks have finished.

        Raises `JobEnded` when the job ends before that.
        """
        self.begin()
        while (order := self.obey()) != "complete":
            if order == "resume" and self._inside(partial(self._train, train)):
                self._left(self._finished())

    def steps(self, last: int) -> Iterator[int]:
        """
        The steps that are left to be computed, up to and including `last`.
        """
        self._has_tails()
        self._end_last_step()  # a loop before this one may have been left in its tail
        while self.step <= last:
            step = self.step
            yield step
            if self.step == step:
                raise UsageError(
                    f"step {step} has ended without an update window: put the optimizer's step "
                    "into `with session.update():`"
                )
            self.end_step()

    def end_step(self) -> None:
        """
        The step has ended, with all that the loop does behind its update window. `session.steps` calls it; in a loop
        without that it is the last line of an iteration. A loop that never calls it ends its steps with their windows:
        what stands behind them is then done by some ranks and not by others, when a fault comes in between.
        """
        if not self._tails:  # this step was taken to end with its window
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
        The update window: `with session.update(): optimizer.step()`. Everything that changes
        the state in place belongs inside, and no sum with other ranks does; one window is one
        optimizer step.
        """
        return self._window

    def after_step(
        self, function: Callable[[int], object], *, every: int = 1, limit: float = LIMIT
    ) -> None:
        """
        Have `function(step)` called after each step, or each `every` steps, when the step has ended: on all ranks, and
        on a replacement, too. To be told before `run`. It may use the groups, and take `limit` seconds; what it draws from
        generators is drawn without effect on training, and it must not change the state. Where a fault comes before
        all ranks have been through it all of them call it again: what it does outside of this process is done at least
        once, with the step to know it by.

        Raises `UsageError` for what cannot be called so.
        """
        self._after.add(function, every, limit)

    def evaluate(
        self, function: Callable[[int], object], *, every: int, limit: float = LIMIT
    ) -> None:
        """
        The same for an evaluation, by all ranks or by one while the others go on and wait for it: for `limit` seconds
        nobody is taken for one that hangs, and a fault elsewhere waits for its end.
        """
        self._after.add(function, every, limit)

    def record(self, row: Mapping[str, object]) -> None:
        """
        Write a row of this step, in its tail too, to `records-rank{rank}.jsonl` in the run directory: once, though the step may be
        computed again or what is called after it be called again. The row gets `step`.
        """
        self._records.write(self._gate.completed if self._gate.in_tail else self.step, row)

    def expect(self, seconds: float) -> None:
        """
        Announces a long phase, an evaluation or a checkpoint: no rank is taken for one that
        hangs before so many seconds have passed.
        """
        self._page.train(True, self._clock.now() + seconds)

    def digests(self) -> Mapping[str, str]:
        """
        Digests of parameters, optimizer, scheduler, RNG and data position.
        """
        digests: Mapping[str, str] = self._adaptor.hook.tft_digests()
        return digests

    # ---------------------------------------------------------------- a loop of the caller's own

    def begin(self) -> None:
        """
        What `run` begins with, for a program that keeps its own loop: this rank is ready, and takes
        orders. Then `obey`.
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
        Waits for the next order, carries it out, and says which it was. After `resume` this thread is
        in the loop: the steps from `session.step` on are to be trained, until `leave` or `finish`. After
        `complete` all is done.

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
        The loop has been left, by an exception that is no `Interrupted`: by a fault; None: because an
        incident has cut it off. Nothing may hold the frames of the loop any more.
        """
        self._audit_left(error)
        self._cut_off(None if error is None else self._fault(error))

    def finish(self) -> None:
        """
        All steps have been trained.
        """
        self._end_last_step()
        self._periodic.finish()
        self._left(self._finished())

    # ---------------------------------------------------------------- the update window

    def open_window(self) -> None:
        """
        The all-reduces are complete: the state of the next step may be made.
        """
        if self._gate.in_tail:
            self._end_step()  # nobody has said that the last one ended, and the next one is here
        completed = self._gate.completed
        private = self._capture(closing=False)
        if private != self._contributed:  # else it is in the page, and is better left alone there
            self._page.capture(completed + 1, private, False)
        if self._audited is not None:
            self._audited.window_opens(completed + 1, tails=self._tails)
        met = not self._has_barrier or self._passes_barrier()
        self._page.move(completed, met, self._clock.now())
        if not met or not self._gate.arrive():
            self._wait_at_window()

    def close_window(self) -> None:
        """
        The state of the step is whole.
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
        All that the loop does in a step is done: this is what other ranks have, too.
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
        Call what is to be called after this step, when nobody holds this rank back. All of that is over, or none.
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
            rank=self.rank,
            world=self.world,
            strict=self._settings.audit == "strict",
            loop=Session._train.__code__,
            awake=self._wake_audit,
            position=lambda: (self._gate.completed, self._gate.in_tail),
        )

    def _wake_audit(self) -> None:
        self._audited = self._audit

    def _passes_barrier(self) -> bool:
        """
        Whether all ranks have finished their all-reduces. If that cannot be known any more, then those who hold something
        else may complete the step, or may be unable to: this one can do either, and waits to be told.
        """
        try:
            self._adaptor.hook.tft_pre_update_barrier()
        except Exception as error:  # noqa: BLE001 (whatever it is, the all-reduces are complete)
            self._control.report(self._fault(error))
            self._gate.stand()
            return False
        return True

    def contributing(self) -> None:
        """
        The adaptor says: from here on the others can finish the step without this rank.
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
        Stand still until the word to go on; False: the loop is to be left.
        """
        self._control.tell(self._gate.standing())
        while isinstance(word := self._gate.wait(window=window), Execute):
            self._carry_out(word)
        return word == "in"

    # ---------------------------------------------------------------- on the training thread

    def _train(self, train: Callable[["Session"], None]) -> None:
        train(self)
        self._end_last_step()
        self._periodic.finish()

    def _inside(self, work: Callable[[], None]) -> bool:
        """
        Do something that belongs to the loop. False: the loop was left in it, by an incident or a fault.
        """
        message: Faulted | None = None
        line = ""
        try:
            work()
        except Interrupted as error:
            line = self._audit_left(error) or _line_below(error)
        except BaseException as error:  # noqa: BLE001 (whatever leaves the user's loop is a fault)
            message, line = self._fault(error), self._audit_left(error) or _line_below(error)
        else:
            return True
        # Here no traceback holds the frames of the loop any more, nor the groups they used.
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
        found: FaultKind | Diagnosis | None = self._adaptor.hook.tft_classify(error=error)
        return found

    def _give(self, shard: str, step: int) -> ShardPayload:
        """
        On a transfer thread. Whoever asked tries the next rank that has it; that this one cannot give
        anything any more, nobody else would find out.
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
        except Exception as error:  # noqa: BLE001 (an order that fails is answered, not raised)
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
        Joins the job; `at` is when `tft.init` was called. Raises `RankTaken` when another
        process holds this rank.
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
    The line of the user's function that was called here (FILE:LINE), where the exception has left it.
    """
    trace = error.__traceback__
    own = _line_below.__code__.co_filename
    while trace is not None and trace.tb_frame.f_code.co_filename == own:
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"


_session: Session | None = None


def init(launcher: Launcher | None = None, options: Sequence[str] = ()) -> Session:
    """
    Joins the job this process was started for and returns its session; the same one when called
    again.

    In a process that torchrun, srun or the like has started it does not return: the process becomes a
    `tft run`, whose rank runs the script from its beginning. `launcher` says who this process is where
    its environment does not, `options` are further ones of that `tft run`. Raises `UsageError` where that
    cannot be, and where nobody has started this process as one of several.
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
