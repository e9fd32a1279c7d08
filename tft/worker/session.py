"""
The session: the part of a worker that runs on the training thread.

In `Session.run` the training thread either runs the user's `train` or carries out the orders of
an incident. It carries them out one by one, in the order in which the control thread passes them.
Only the digests of the state, for the order `compare`, are computed on another thread.
"""

import atexit
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

import structlog

from tft.checkpoint import CheckpointStore, checkpoint_store_of
from tft.clock import SystemClock
from tft.config import RankSettings
from tft.core.rank.protocol import Done, Execute, Left
from tft.errors import Interrupted, JobEnded, UsageError
from tft.limits import no_thread
from tft.logs import quiet_log
from tft.page import Page
from tft.plugins import check_complete, load_adaptor, load_plugins
from tft.protocol.messages import (
    Compare,
    Complete,
    End,
    Faulted,
    Finished,
    Joined,
    OrderName,
    Ready,
    Rebuild,
    Regroup,
    Resume,
    Rollback,
    Save,
    Stop,
)
from tft.spi.state import is_position_of_loop
from tft.spi.types import Made, ShardPayload
from tft.transfer.server import ShardServer
from tft.transfer.tls import Tls, read_tls
from tft.worker.after import LIMIT, AfterPhase, AfterSteps
from tft.worker.control import Control
from tft.worker.digest_records import DigestRecords
from tft.worker.fault_reports import FaultReports
from tft.worker.observers import Observers
from tft.worker.order_executor import NOT_CAPTURED, Hands, Work
from tft.worker.periodic import Periodic
from tft.worker.process import started_ticks
from tft.worker.records import Records
from tft.worker.replica_groups import Holdings
from tft.worker.saving import Saving, own_functions
from tft.worker.step_gate import Gate
from tft.worker.step_loop import StepLoop, UpdateWindow, step_hooks
from tft.worker.step_marks import marks_ends
from tft.worker.work_clock import WorkClock

log = structlog.get_logger()

_OWN = str(Path(__file__).parent)
"""The directory with the code of the worker. Stack frames of its files do not belong to the
user."""


class Session:
    """
    One rank's part in a fault-tolerant job.

    `init` creates the session. Use the session on the training thread only.
    """

    def __init__(self, settings: RankSettings) -> None:
        self._settings = settings
        self._clock = SystemClock()
        adaptor = load_adaptor(settings.adaptor)
        check_complete(adaptor, settings.adaptor)
        self._hook = adaptor.hook
        self._page = Page.open(settings.page)
        if not self._page.live():
            log.warning(
                "death_known_late",
                why="the agent held the mutex of the page all the time; the end of this process "
                "may be known some tens of milliseconds later",
            )
        self._gate = Gate(self._hook)
        self._control = Control(settings, self._gate)
        self._observers = Observers(load_plugins())
        self._faults = FaultReports(
            settings, self._hook, self._observers.device_faults(), self._gate
        )
        self._server = ShardServer(
            settings.host, settings.job, self._give, read_tls(settings.curve)
        )
        check = partial(self._observers.check, self)
        self._saving = Saving(self._hook)
        self._hands = Hands(self, self._gate, self._hook, self._page, self._saving, check)
        self._records = Records(
            settings.run_dir, settings.rank, lambda: self._loop.refuse_after_abort()
        )
        log_file = f"rank-{settings.rank}.{settings.incarnation}.log"
        quiet_log.open(settings.run_dir / "logs" / log_file)
        self._loop = self._make_loop()
        self._called: Literal["init", "adopt", "run", "train"] = "init"
        """How far the script has come: the last method that it has called, or `train` after the
        first order to train or to complete the job."""
        self.model: Any = None  # Any: the object that the user's function returned

    def _make_loop(self) -> StepLoop:
        settings, digests = self._settings, self._hands.digests
        periodic = Periodic(
            settings, self._hook, self._saving, self._control.report, self.expect,
            self._gate.abandoned, digests,
        )  # fmt: skip
        loop = StepLoop(
            settings=settings,
            page=self._page,
            gate=self._gate,
            control=self._control,
            hooks=step_hooks(self._hook),
            observers=self._observers,
            periodic=periodic,
            after=AfterPhase(
                AfterSteps(self._hook), self._records, digests, self._hands.slices.forget
            ),
            fault=self._faults.report,
            carry_out=self._carry_out,
        )
        loop.watch(self._hook)
        if settings.record_digests:
            path = settings.run_dir / f"digests-rank{settings.rank}.jsonl"
            loop.digests = DigestRecords(path, self._hook, digests)
        return loop

    # ---------------------------------------------------------------- the interface for scripts

    @property
    def rank(self) -> int:
        """
        The number of this rank in the job.
        """
        return self._settings.rank

    @property
    def successor(self) -> bool:
        """
        Return True if this process was started to replace a process that still trained at that
        time.
        """
        return self._settings.successor

    @property
    def world(self) -> int:
        """
        The number of ranks of the job.
        """
        return self._settings.world

    @property
    def incarnation(self) -> int:
        """
        Return how many processes have held this rank before this process: 0 for the first.
        """
        return self._settings.incarnation

    @property
    def run_dir(self) -> Path:
        """
        The run directory, in which this run keeps its records.
        """
        return self._settings.run_dir

    @property
    def incarnations(self) -> Mapping[int, int]:
        """
        The incarnation of each rank's process, by rank. The numbers come from the controller's last
        order to this rank.
        """
        return self._observers.incarnations

    def export(self) -> Path | None:
        """
        Return the directory in which the loop is to write a checkpoint in the format of its
        framework, if the job was resumed only to write that checkpoint (`--export-only`). Otherwise
        return None.

        A loop that can write such a checkpoint calls this method before `begin` or `run`. When all
        ranks have written the checkpoint, the loop ends as it does after its last step.
        """
        self._saving.exports = True
        return self._settings.export if self._settings.export_only else None

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
        The TLS settings of shard transfers, or None if transfers are not encrypted.
        """
        return self._server.tls

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
        return self._loop.step

    @property
    def evaluating(self) -> bool:
        """
        Return True while a function of `after_step` or `evaluate` runs.

        That function is called after step `session.step - 1`.
        """
        return self._loop.after.running

    def adopt(self, *, wrap: Callable[[], Any] | None = None, **parts: Any) -> None:
        """
        Hand over the objects that make up the training state.

        `parts` are `model`, `optimizer`, and, if the script has them, `scheduler` and `data` (an
        object whose `state_dict()` is its position). `wrap` builds the wrapper around the model
        (`lambda: DDP(model)`). tft calls `wrap` at the start and after every incident, and keeps
        the result as `session.model`.

        `save(directory, step)` and `load(directory)` are optional. These functions of the script
        write and read checkpoints in place of the adaptor, on the training thread and without
        process groups.

        Raises `UsageError` if the adaptor cannot handle one of the objects, or if batches are to be
        left out (`--skip-batch`) and the adaptor or `data` cannot do that.
        """
        if self._settings.skip_batch:
            self._check_skip(parts.get("data"))
        own = own_functions(parts)
        parts = {name: part for name, part in parts.items() if name not in ("save", "load")}
        self._hook.tft_watch(
            contributing=self._loop.contributing, early=self._settings.bell is not None
        )
        self._loop.watch_work(self._hook)
        self._hook.tft_adopt(parts=parts, wrap=wrap)
        if self._loop.audit and is_position_of_loop(parts.get("data")):
            self._loop.audit.leave_position()
        if own is not None:
            self._saving.give(own)
        self._loop.periodic.check()
        self._loop.check_backups()
        if self._loop.digests is not None:
            self._loop.digests.watch()
        if self._called == "init":
            self._called = "adopt"
        # if a function (`make`) makes the model later, the observers of the plugins get the objects
        # after that
        if "model" in parts:
            self._observers.adopted(parts)

    def topology(self) -> Holdings:
        """
        Return the shards that this rank holds, each with all ranks that hold a copy of it.

        The adaptor reads them from the adopted objects. To print them: `print(session.topology())`.
        """
        shards = self._hook.tft_shards(rank=self.rank, world=self.world)
        return Holdings(rank=self.rank, groups={each.shard: each.ranks for each in shards})

    def run(self, train: Callable[["Session"], None]) -> None:
        """
        Call `train(session)`, and call it again after every incident. `session.step` then says at
        which step training continues.

        Returns when all ranks have finished. Raises `JobEnded` when the job ends before that. Raises
        `UsageError` if this method was called before: a job trains with one `train`.
        """
        self.begin()
        if marks_ends(train, self):
            self._loop.has_tails()
        while (order := self.obey()) != "complete":
            if order == "resume" and self._inside(partial(self._loop.train, partial(train, self))):
                self._left(self._finished())

    def steps(self, last: int) -> Iterator[int]:
        """
        Yield the steps that remain to be computed, up to and including `last`.

        When the loop asks for the next step, the present step ends. Raises `UsageError` when a step
        ends without an update window.
        """
        yield from self._loop.steps(last)
        if self._control.compared.wanted:
            # announce a long phase: to digest a large state takes longer than a step
            self._loop.expect(LIMIT)
            self._hands.ends()
            self._page.train(True, self._clock.now())

    def end_step(self) -> None:
        """
        Mark the end of the step, including its tail (the code of the loop after the update window).

        `session.steps` calls this. In a loop without `session.steps`, call it as the last line of
        each iteration. If a loop never calls it, each step ends with its update window. A fault
        after the window may then leave a tail that some ranks have executed and others have not.

        `run` reads the code of `train` for such calls, so that the first step has a tail too. If a
        call is hidden from it, for example in an object of another module, call this method once
        before the first step. The call then says only that the loop marks the ends of its steps.
        """
        self._loop.end_step()

    def update(self) -> UpdateWindow:
        """
        Return the update window: `with session.update(): optimizer.step()`.

        Put all code that changes the training state in place into the window. Put no all-reduce
        with other ranks into the window. One window is one optimizer step.
        """
        return UpdateWindow(self._loop)

    def after_step(
        self, function: Callable[[int], object], *, every: int = 1, limit: float = LIMIT
    ) -> None:
        """
        Register `function(step)`, to be called when a step has ended: after every `every` steps.

        All ranks call the function, replaced ranks too. Register the function before `run`. The
        function may use the process groups and may take `limit` seconds. It may draw random
        numbers: tft restores the random generators afterwards, so training is not affected. The
        function must not change the training state, and must not take batches from the adopted
        `data`. If it changes parameters for a moment, it must put them back in a `finally`.

        If a fault occurs before all ranks have finished the function, all ranks call it again.
        Effects outside this process therefore happen at least once; use `step` to recognise a
        repetition.

        Raises `UsageError` if `function` is not callable or was registered before, or if `every` or
        `limit` is too small.
        """
        self._loop.after.functions.add(function, every, limit)

    def evaluate(
        self, function: Callable[[int], object], *, every: int, limit: float = LIMIT
    ) -> None:
        """
        Register an evaluation `function(step)`, with the same rules as `after_step`.

        Either all ranks evaluate, or one rank evaluates. In the second case the other ranks go on
        to the next step, and wait for the evaluating rank in the collectives of that step. For
        `limit` seconds no rank counts as hanging. If a fault occurs on another rank, it is handled
        when the evaluation has ended.
        """
        self._loop.after.functions.add(function, every, limit)

    def record(self, row: Mapping[str, object]) -> None:
        """
        Write a row for this step to `records-rank{rank}.jsonl` in the run directory.

        A row that is written after the update window of a step, but before the end of the step,
        belongs to that step. The key `step` is added to the row. The file contains the row once,
        even if the step is computed again or a function of `after_step` is called again.

        Call this method before the last all-reduce of the step (with DDP: before
        `loss.backward()`). If this rank dies after its contribution to that all-reduce, the other
        ranks complete the step without this rank. A row that this rank would have written later is
        then missing.

        Raises `UsageError` before training has begun, where a row belongs to no step. Also raises it
        if the row has a key `step` or `after`, or cannot be written as JSON.
        """
        self._records.write(self._step_of_row("session.record"), row)

    def log(self, values: Mapping[str, object] | None = None, /, **named: object) -> None:
        """
        Log values of this step, as in `session.log(loss=loss, lr=rate)`, or
        `session.log({"val/loss": x})` for names that are not Python identifiers.

        `tft run --log` sends them to wandb, MLflow, TensorBoard or another logger, once for each
        step. The step is the same as for `record`, and so are the rules: call this method before
        the last all-reduce of the step, or call it on all ranks with equal values. If several ranks
        log a name in the same step, the value of the lowest rank is sent.

        A value is a number, or an object with one number, such as a tensor with one element. A
        tensor on a device makes this call wait for the device.

        Raises `UsageError` before training has begun, as `record` does. Also raises it if a name is no
        text, or if a value is no number.
        """
        step = self._step_of_row("session.log")
        self._records.log(step, {**(values or {}), **named})

    def expect(self, seconds: float) -> None:
        """
        Announce a long phase, such as an evaluation or a checkpoint, of at most `seconds` seconds.

        No rank counts as hanging before `seconds` have passed. Raises `UsageError` if `seconds` is
        negative or infinite.
        """
        if not 0 <= seconds < math.inf:
            raise UsageError(
                f"session.expect was given {seconds}: give the seconds that the phase may take at "
                "most, as a number"
            )
        self._loop.expect(seconds)

    def compare_slices(self, of: int) -> None:
        """
        Cut each shard into `of` slices, so that the controller can compare copies while the job
        trains; see `tft.spi.SessionView`.
        """
        self._control.compared.cycle = of

    def digest_slice(self, number: int) -> Callable[[], None] | None:
        """
        Digest one slice of every shard that several ranks hold, and send the digests to the
        controller; see `tft.spi.SessionView`.
        """
        of = self._control.compared.cycle
        work = self._hands.slices.digest(self._gate.completed, number, of)
        if work is not None and not self._loop.tails:
            # digest the slice now: in a loop that does not mark the ends of its steps, code after
            # the window may change the state
            work()
            return None
        return work

    def measure_work(self) -> None:
        """
        Measure how long this rank works in each step; see `tft.spi.SessionView`.
        """
        self._observers.work = WorkClock(self._page)

    def digests(self) -> Mapping[str, str]:
        """
        Return digests of parameters, optimizer, scheduler, RNG and data position.
        """
        digests: Mapping[str, str] = self._hook.tft_digests()
        return digests

    # ---------------------------------------------------------------- programs with their own loop

    @property
    def audited(self) -> bool:
        """
        True if tft audits the present step (looks for habits of the loop that an incident cannot
        repair). By default tft audits only the first steps of each process.
        """
        return self._loop.audited

    def unkept(self, what: str, sentence: str) -> None:
        """
        Report state of the script that changes while training and that the adaptor does not keep.
        For adaptors that look for such state in audited steps.

        `sentence` says what the state is and what the user should do. It is logged once for each
        `what`, and is in the report of each later incident. With `--audit strict`, raises
        `UsageError`.
        """
        self._loop.unkept(what, sentence)

    def begin(self) -> None:
        """
        Report this rank as ready to take orders. For programs with a training loop of their own.

        Call `obey` next. A program that uses `run` needs neither call: `run` calls `begin` and
        `obey` itself. Raises `UsageError` if `adopt` was not called, if this method was called
        before, or if the user's save and load cannot tell the shards of this rank apart.
        """
        if self._called in ("run", "train"):
            raise UsageError(
                "session.run was called a second time, but a job trains with one train function: "
                "put both trainings into one function, or make two jobs of them, of which the second "
                "one loads a checkpoint of the first one"
            )
        if self._called == "init":
            raise UsageError(
                "session.run was called before session.adopt: hand the training state over first"
            )
        self._called = "run"
        shards = self._hook.tft_shards(rank=self.rank, world=self.world)
        self._saving.check(shards, self._settings.export)
        self._hands.slices.begin(shards)
        if self._control.compared.wanted and not self._hands.slices.listable:
            raise UsageError(
                f"the adaptor {self.adaptor!r} cannot list the memory of its shards (tft_slices), so "
                "no copies would be compared while the job trains: run without --integrity"
            )
        self._loop.begin(shards, asynchronous=bool(self._hook.tft_asynchronous()))
        self._control.report(
            Ready(
                rank=self.rank,
                incarnation=self.incarnation,
                shards=tuple(shards),
                column=tuple(self._hook.tft_column(rank=self.rank, world=self.world) or ()),
                strategies=tuple(self._hook.tft_strategies()),
                reloads=self._hook.tft_reload() is not None,
                after=self._loop.after.functions.limit,
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
                    self._called = "train"
                    if tails:
                        self._loop.has_tails()
                    self._control.tell(self._done(execute, self._clock.now()))
                    self._loop.periodic.resumed((execute.order.incident, execute.order.round))
                    self._hands.slices.resume(execute.order.incident, execute.order.round)
                    self._page.train(True, self._clock.now())
                    self._gate.enter()
                    if again and not self._inside(self._loop.call_again):
                        continue
                case Complete():
                    self._called = "train"
                    self._control.tell(self._done(execute, self._clock.now()))
                case End(code=code):
                    self._control.tell(self._done(execute, self._clock.now()))
                    raise JobEnded(code)
                case _:
                    self._carry_out(execute)
            return execute.name

    def leave(self, error: BaseException | None = None) -> None:
        """
        Report that the program has left its training loop.

        `error` is the exception that ended the loop, which is reported as a fault. It is None if
        the loop ended with `Interrupted`, that is by an incident. The program must keep no
        reference to the stack frames of the loop, because these would keep process groups alive.
        """
        self._loop.left(error)
        self._cut_off(None if error is None else self._faults.report(error))

    def attempt(self, work: Callable[[], None]) -> bool:
        """
        Run `work`, a part of the program's training loop. Return False if an incident or a fault
        has ended it: call `obey` next, and then repeat the steps from `session.step` on.

        The exception of a fault is reported, and not raised.
        """
        return self._inside(partial(self._loop.attempt, work))

    @property
    def over(self) -> bool:
        """
        True if the job has trained the last step that it was started for (`tft verify` runs a few
        steps only), so that the program must leave its loop.
        """
        return self._loop.over

    def finish(self) -> None:
        """
        Report that all steps have been trained.
        """
        self._loop.finish()
        self._left(self._finished())

    def synchronize(self) -> None:
        """
        Wait until the device has done its work. Raises an exception if a collective may have been
        aborted, because the result of an aborted collective is wrong. For programs with a training
        loop of their own.

        Call this at the end of the function that is given to `attempt`, before results of
        collectives are used outside that function. A device reports an aborted collective as a
        success, so nothing else shows that the result is wrong. Where a collective is complete when
        its call returns, this method does nothing.
        """
        self._loop.synchronize()

    def contributing(self) -> None:
        """
        Capture the rank-local state, because from now on the other ranks can finish the step
        without this rank. If they do, a process that replaces this one needs the captured state.

        The adaptor calls this in every step (see `tft_watch`).
        """
        self._loop.contributing()

    def open_window(self) -> None:
        """
        Open the update window, as `with session.update()` does.

        Raises `Interrupted` when an incident takes this rank out of the loop.
        """
        self._loop.open_window()

    def close_window(self) -> None:
        """
        Close the update window: the state of the step is complete.
        """
        self._loop.close_window()

    # ---------------------------------------------------------------- on the training thread

    def _check_skip(self, data: object) -> None:
        """
        Raise `UsageError` if batches of `data` cannot be left out.
        """
        if not self._hook.tft_skip.get_hookimpls():
            raise UsageError(
                f"the adaptor {self._settings.adaptor!r} cannot leave out batches (tft_skip): run "
                "without --skip-batch"
            )
        refuse_without_skip(data)

    def _step_of_row(self, call: str) -> int:
        """
        Return the step to which a row belongs that the script writes now with `call`.

        Raises `UsageError` before training has begun in this process. The step is not known there,
        and a replacement process would write the row again.
        """
        if self._called != "train":
            raise UsageError(
                f"{call} was called before the training loop, where a row belongs to no step: call "
                "it in the loop, for example in step 1, or write what is known before the loop to a "
                "file of its own in session.run_dir"
            )
        return self._gate.completed if self._gate.in_tail else self.step

    def _inside(self, work: Callable[[], None]) -> bool:
        """
        Run `work`, which is code of the training loop. Return False if an incident or a fault ended
        the loop in `work`.
        """
        message: Faulted | None = None
        line = ""
        try:
            work()
        except Interrupted as error:
            line = self._loop.left(error) or _line_below(error)
        except BaseException as error:  # noqa: BLE001 (any exception of the user's loop is a fault)
            message, line = self._faults.report(error), self._loop.left(error) or _line_below(error)
        else:
            return True
        # Call `_cut_off` only here: inside `except`, the traceback would still refer to the stack
        # frames of the loop, and so keep the process groups alive that these frames use.
        self._cut_off(message, line)
        return False

    def _finished(self) -> Finished:
        return Finished(
            rank=self.rank,
            incarnation=self.incarnation,
            step=self._gate.completed,
            sliced=self._control.compared.wanted,
            at=self._clock.now(),
        )

    def _cut_off(self, message: Faulted | None, line: str = "") -> None:
        """
        Capture the rank-local state at the moment at which the loop was left, and report the fault
        `message`. If the state cannot be captured, report `message` nevertheless, and report a lost
        device context if that is the reason. If there is neither a fault nor a lost device context
        to report, raise the exception of the capture: the process ends, and another process takes
        its place.
        """
        step, captured = self.step, b""
        try:
            captured = self._loop.hooks.capture(closing=False)
        except Exception as error:
            log.warning("local_state_not_captured", step=step, exc_info=True)
            message, step = self._faults.also(message, error), NOT_CAPTURED
        self._hands.interrupted(step, captured, line)
        self._left(message)

    def _left(self, message: Faulted | Finished | None) -> None:
        self._gate.leave()
        self._observers.state_released()
        self._hands.slices.forget()
        self._loop.periodic.left()
        self._page.train(False, self._clock.now())
        if message is not None:
            self._control.report(message)
        self._control.tell(Left(at=self._clock.now()))

    def _give(self, shard: str, step: int) -> ShardPayload:
        """
        Return a shard at the end of `step`, to be sent to another rank. Runs on a transfer thread.

        If this method raises an exception, the other rank fetches the shard from other holders. If
        the exception shows that this rank can no longer use its device (its device context is
        lost), this method also reports a fault, because nothing else would report the lost device.
        """
        try:
            return self._hands.give(shard, step)
        except Exception as error:
            if self._faults.diagnose(error).context_lost:
                self._control.report(self._faults.report(error))
            raise

    def _carry_out(self, execute: Execute) -> None:
        began = self._clock.now()
        order = execute.order
        self._observers.incarnations = order.incarnations
        try:
            heading = order.step if isinstance(order, Regroup) else self.step
            self._observers.order(execute.name, order.incident, heading)
        except Exception as error:  # noqa: BLE001 (the failure of an order is answered, not raised)
            return self._answer_failure(execute, began, error)
        if isinstance(order, Compare):
            return self._compare_aside(execute, began)
        return self._carry_out_here(execute, began)

    def _compare_aside(self, execute: Execute, began: float) -> None:
        """
        Digest the state on another thread, so that the training thread can form process groups
        meanwhile. If the system has no more threads, digest the state on this thread.
        """
        thread = threading.Thread(
            target=self._compare, args=(execute, began), name="tft-compare", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("compares_on_training_thread", why=no_thread(error))
            self._carry_out_here(execute, began)

    def _compare(self, execute: Execute, began: float) -> None:
        try:
            self._carry_out_here(execute, began)
        except BaseException:
            log.critical("comparison_died", rank=self.rank, exc_info=True)
            os._exit(70)  # the agent notices the end at once, and the rank gets another process

    def _carry_out_here(self, execute: Execute, began: float) -> None:
        order = execute.order
        try:
            if isinstance(order, Rollback):
                self._loop.periodic.rolled_back(order.step)
                self._records.drop_later(order.step)
            work = self._hands.carry_out(order)
            if isinstance(order, Rollback):
                self._loop.rolled_back(order.step)
            if isinstance(order, Stop) and self._loop.after.settle():
                self._gate.tear()
            self._tell_of_what_was_made(order)
        except Exception as error:  # noqa: BLE001 (the failure of an order is answered, not raised)
            return self._answer_failure(execute, began, error)
        return self._control.tell(self._done(execute, began, work=work))

    def _answer_failure(self, execute: Execute, began: float, error: Exception) -> None:
        failure = f"{type(error).__name__}: {error}"
        lost = self._faults.diagnose(error).context_lost
        log.warning("order_failed", order=execute.name, why=failure)
        work = self._hands.left_to_save() if isinstance(execute.order, Save) else Work()
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
            local_state=work.local_state,
            digests=work.digests,
            compared=work.compared,
            line=work.line,
            odd=work.odd,
            lost=work.lost,
            inexact=self._loop.inexact,
            tails=self._loop.tails,
            began=began,
            at=self._clock.now(),
        )

    # ---------------------------------------------------------------- joining the job

    def open(self, at: float) -> Self:
        """
        Join the job. `at` is the time CLOCK_MONOTONIC in seconds at which `tft.init` was called.

        Raises `RankTaken` when another process holds this rank.
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
            strategies=tuple(self._hook.tft_strategies()),
            derives=bool(self._hook.tft_derive.get_hookimpls()),
            at=at,
        )
        self._control.start(joined)
        atexit.register(self._close)
        self._observers.opened(self)
        return self

    def _close(self) -> None:
        self._loop.periodic.close()
        self._control.close()
        self._server.close()


def refuse_without_skip(data: object) -> None:
    """
    Raise `UsageError` if the object `data` of `session.adopt` has no method `skip(batches)`. `data`
    is None if the script has handed over no such object.
    """
    if callable(getattr(data, "skip", None)):
        return
    why = (
        "the script has handed over no `data` with a method skip(batches)"
        if data is None
        else "the data of this training loop cannot skip batches: a "
        f"{type(data).__name__} has no method skip(batches)"
    )
    raise UsageError(
        "--skip-batch skips the batches of a step whose loss or gradient norm is refused, but "
        f"{why}. Run without --skip-batch, or hand over `data` with this method"
    )


def _line_below(error: BaseException) -> str:
    """
    Return the line (FILE:LINE) of the user's function from which the exception `error` came. Empty
    if no frame of the user is in the traceback.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_OWN):
        trace = trace.tb_next
    return "" if trace is None else f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}"
