"""
The hook specifications of an adaptor.

An adaptor connects tft to one framework, such as PyTorch. A worker (the process of a rank) loads
exactly one adaptor, by name. Unless the text of a hook says otherwise, the worker calls the hook on
the training thread, while that thread is out of the training loop.

If a hook raises an exception while the worker carries out an order of the controller, the order has
failed. The controller then decides what to do next.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft.protocol.messages import FaultKind, GroupStanding, ShardCopies
from tft.spi.markers import hookspec
from tft.spi.types import (
    Buffer,
    Diagnosis,
    Guard,
    LauncherStore,
    Numbers,
    ShardPayload,
    SliceContent,
    WorkMeter,
)


class AdaptorSpecs:
    """
    The specifications of an adaptor's hooks.

    An adaptor must implement the hooks in `NEEDED_HOOKS`. The texts of the other hooks say when
    they are needed.

    The update window of a step is the part in which the optimizer changes the state (`with
    session.update():`). The tail is the code of the loop between the window and the end of the
    step.
    """

    # ------------------------------------------------------------ the process of a rank

    @hookspec(firstresult=True)
    def tft_strategies(self) -> Sequence[str]:
        """
        Return the names of the recovery strategies that this adaptor supports.

        The possible names are `retry`, `recover`, `scale_in`, `scale_out`, `migrate` and `dump`.
        The hook is called in `tft.init`, and again when this rank is ready. It is called once more
        before process groups are formed without ranks that have left the job.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_preload(self) -> None:
        """
        Import the modules that the framework would otherwise import late, during training.

        The hook is called before the user's script starts. After a fault, the other ranks wait for
        the process that replaces a lost one. That process must not spend time on imports while the
        other ranks wait.
        """

    @hookspec(firstresult=True)
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        """
        Serve the rendezvous store, with which ranks form process groups, at `host` and `port`.

        The hook runs in a process of its own, and serves until that process is ended. If `port` is
        0, choose a free port. When the store accepts connections, call `opened` with the port.
        """

    # ------------------------------------------------------------ under another launcher

    @hookspec(firstresult=True)
    def tft_begun(self) -> str | None:
        """
        Return a text that names what the framework has already started in this process, or None.

        The text names everything that connects this process to other processes, such as a process
        group. None means that nothing was started. The hook is called in a process that another
        launcher has started, before the process replaces itself by the command `tft run` (exec).
        Other processes that are connected to this process would then wait forever. So tft does not
        replace the process if the hook returns a text.

        Not needed: without this hook tft assumes that the framework has started nothing.
        """

    @hookspec(firstresult=True)
    def tft_launcher_store(self, host: str, port: int) -> LauncherStore:
        """
        Return the key-value store that the framework's own launcher serves at `host` and `port`.

        Raise a `UsageError` if the store does not answer.

        Not needed: an adaptor implements this hook only if its framework has such a launcher.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ the training state

    @hookspec(firstresult=True)
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the framework's objects can have any class
        wrap: Callable[[], Any] | None,
    ) -> None:
        """
        Take over the user's training objects, which the script has given to `session.adopt`.

        `parts` maps the argument names of `session.adopt` to the objects. It contains `model` and
        `optimizer`, and may contain `scheduler`, `data` and other names. The function `wrap` builds
        the framework's wrapper (for example DDP) around the model; None means that there is no
        wrapper.

        If the adaptor cannot handle an object or does not know its name, raise a `UsageError`
        before any object is changed.
        """

    @hookspec(firstresult=True)
    def tft_shards(self, rank: int, world: int) -> Sequence[ShardCopies]:
        """
        Return the shards (pieces of training state) that this rank holds.

        Each result names the shard and all ranks that hold a copy of the shard.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_column(self, rank: int, world: int) -> Sequence[int]:
        """
        Return the ranks of the model replica to which this rank belongs, this rank included.

        A model replica is a set of ranks that together hold the whole model. To compute, each rank
        of the set needs the parts of the model on the other ranks of the set. When the job
        continues with fewer ranks, the ranks of a model replica leave together, and return
        together. When two copies of a shard differ, the gradients of the ranks of a model replica
        can show which copy is wrong. An empty sequence means this rank alone.

        Not needed: without this hook each rank leaves alone.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_capture(self, closing: bool) -> bytes:
        """
        Return the rank-local state of this rank: the state of the random generators (RNG) and the
        data position.

        The hook is called when an update window opens and when it closes, in every step. So the
        hook may take only a few microseconds and must not synchronise the device. `closing` is True
        when the window closes. The result then counts as the state at the end of the step, unless
        `tft_end_step` returns a changed state.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_opening(self) -> None:
        """
        Check that a fault could still be repaired if this step is completed.

        The hook is called in every step, on the training thread, before its update window opens.
        The state is still that of the end of the step before. Raise `UsageError` if the script has
        changed something that the adaptor cannot restore: the job then ends with a last checkpoint
        of the step before. The hook may take only a few microseconds.

        Not needed: without this hook nothing is checked.
        """

    @hookspec(firstresult=True)
    def tft_watch(self, contributing: Callable[[], None], early: bool) -> None:
        """
        Arrange that `contributing()`, which stores the rank-local state, is called on the training
        thread in every step.

        The call must come after this rank has drawn its batch and its random numbers. It must come
        before this rank contributes to the last all-reduce of the step. After that contribution,
        the other ranks can finish the step without this rank. If this rank then dies, its
        replacement continues with the rank-local state at the time of the call.

        `early` True means that another node also keeps the rank-local state of this rank, and
        should receive it as early as possible. Then call `contributing()` also at the end of each
        forward pass, if the additional call needs no other work. Only the last call in a step
        counts. A call costs next to nothing if the rank-local state has not changed.

        The hook is called once, before `tft_adopt`.
        """

    @hookspec(firstresult=True)
    def tft_rollback(self, local_state: bytes, step: int) -> str | None:
        """
        Restore the rank-local state `local_state`, and drop the gradients. Return None, or a
        sentence that says what was lost and could not be restored. The report of the incident has
        this sentence, and does not call the training exact.

        `local_state` is a result of `tft_capture` in this process, or in an earlier process of this
        rank. All ranks continue from the end of `step`. Drop the copies of later steps that
        `tft_backup` has made: these steps are computed again, and may then have another result.
        """

    @hookspec(firstresult=True)
    def tft_skip(self, batches: int) -> None:
        """
        Draw `batches` batches from the data and drop them.

        The hook is called after a rollback, so that training continues without the dropped batches.

        Not needed: without this hook tft cannot leave out batches.
        """

    @hookspec(firstresult=True)
    def tft_derive(self, step: int) -> bytes:
        """
        Compute the rank-local state of this rank at the end of `step` from the step number alone.

        Return the state in the form in which `tft_capture` returns it. The hook is called when the
        captured state was lost with a node. It is also called when this rank returns to the job
        after the other ranks have continued without it. Parts that cannot be computed, such as the
        RNG, get the values that they have at a fresh start.

        Not needed: without this hook, a rank whose captured state is lost cannot continue.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_pre_update_barrier(self, refuses: bool | None) -> bool | None:
        """
        Wait until the all-reduces of the step are complete on all ranks (pre-update barrier).

        The hook is called in every step if some shard is not held by all ranks. It is also called
        in every step if gradients cannot tell the other ranks that this rank refuses the update
        (see `tft_watch_numbers`), or if `tft_asynchronous` returns True. The call comes when this
        rank's all-reduces are complete and its update window is about to open. Raise an exception
        if it is unknown whether all other ranks have come to this point.

        `refuses` is True if this rank refuses the update because of its numbers, False if it does
        not, and None if no plugin watches the numbers (losses and gradient norms). `refuses` is
        None on all ranks or on none. If `refuses` is not None, return whether some rank refuses the
        update. An adaptor without `tft_watch_numbers` may omit this argument.

        Not needed if no rank can complete a step that another rank cannot complete. Without this
        hook, a rank may complete a step that the holders of other shards cannot complete.
        """

    @hookspec(firstresult=True)
    def tft_asynchronous(self) -> bool:
        """
        Return whether collectives return before they are complete, because a device carries them
        out later. CUDA devices with NCCL are an example.

        The hook is called before training begins. If it returns True, `tft_synchronize` is called
        at both edges of each update window, and `tft_pre_update_barrier` in every step.

        Not needed: without this hook each call counts as complete when it returns.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_synchronize(self, closing: bool) -> None:
        """
        Wait until the device has done all its work.

        The hook is called with `closing=False` before an update window opens. It is called with
        `closing=True` before the window closes, and again before the step ends. A program with a
        training loop of its own may have it called with `closing=True` at any other place of a step
        (`Session.synchronize`).

        Raise an exception if a collective in the work of the device may have been aborted, or if a
        communicator reports an error. A device reports an aborted collective as a success, so
        nothing else shows that the collective's result is wrong. With `closing=True`, check only
        the collectives that were begun since the last call of this hook.

        The effect of the exception depends on the call. Before the window opens, the rank leaves
        the loop with the state of the step before. Before the window closes, the rank counts as
        having no complete state. Before the step ends, the rank counts as interrupted in its tail.

        Needed if `tft_asynchronous` can return True.
        """

    @hookspec(firstresult=True)
    def tft_updated(self) -> None:
        """
        Send the other ranks what only this rank has computed in the update, such as its share of
        the new parameters.

        The hook is called in every step, when the update window has closed on this rank. The hook
        may wait for the other ranks. An exception in this hook counts as a fault in the next step.

        Not needed: without this hook every rank computes the whole step.
        """

    @hookspec(firstresult=True)
    def tft_end_step(self, tail: bool) -> bytes | None:
        """
        Store the settings that a script may change at the start of its next iteration.

        Examples are the learning rate and the modes of modules (training or evaluation). The hook
        is called in every step, when the step has ended with its tail (the code of the loop after
        the update window). If a later fault interrupts the training loop, `tft_clear` restores the
        stored settings, so that all ranks have the same settings.

        Return None if the rank-local state has not changed since `tft_capture(closing=True)`. If
        the tail has changed a part of the rank-local state, return the rank-local state with this
        change, but with the RNG and the data position of that capture.

        `tail` True means that the training loop has marked the end of the step. `tail` False means
        that the update window has just closed and the tail is still to come.

        Not needed: without this hook no setting is restored.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_set_aside(self) -> Callable[[], None]:
        """
        Return a function that restores the random generators, the modes of modules (training or
        evaluation), and the buffers that the forward pass changes to their present state.

        The hook is called before tft calls a function of the user that is not part of training,
        such as an evaluation. The returned function is called after the function of the user.

        Not needed: without this hook, training continues with all of these as the function of the
        user has left them.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_guard(self, room: int) -> Guard | None:
        """
        Watch the training state from now on, and return the object that does so.

        The hook is called before each call of a function of the user that is not part of training,
        such as an evaluation. Some of these functions change parameters for a moment. If an
        exception leaves such a function, the parameters may stay changed. Keep a copy of the
        parameters if it has at most `room` bytes, and put it back in the next `tft_clear` after
        such an exception.

        Not needed: without this hook nothing is put back, and changes are found only in those calls
        before which tft has digested the state.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_backup(self, step: int, sound: int, copies: int) -> Callable[[], None] | None:
        """
        Store a copy of the whole state at the end of `step` in memory, and keep the newest `copies`
        copies.

        `copies` is 2 as a rule. It is 3 if comparing a copy among the ranks takes more than half of
        the time between two copies.

        The hook is called every N steps (`--backup-every N`), when `step` has ended with its tail.
        `sound` is the last step at whose end the states of all ranks were compared and found equal.
        All ranks must keep a copy of one common step that is known to be equal. So if there are
        `copies` copies already, and all except the oldest are of later steps than `sound`, drop no
        copy and make no new one.

        Copy at once what the next step may change before its update window opens. The rest may be
        copied on another thread. In this case return a function that waits until the copy is
        complete. Return None if the copy is complete already. The returned function is called on
        the training thread, before the next update window opens and before functions of the user
        are called after the step. If another hook of this adaptor is about to change the state, the
        adaptor itself must wait for the copy.

        Not needed: without this hook `--backup-every` is refused, and `tft_backups` and
        `tft_restore` are not called.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_backups(self) -> Sequence[int]:
        """
        Return the steps for which this rank has a complete copy made by `tft_backup`.

        The hook may be called on any thread. It is needed if the adaptor has `tft_backup`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_restore(self, step: int) -> None:
        """
        Restore the state at the end of `step` from the copy made by `tft_backup`, and keep the
        copy. The hook is needed if the adaptor has `tft_backup`.
        """

    @hookspec(firstresult=True)
    def tft_give(self, shard: str, step: int, kept: bool) -> ShardPayload:
        """
        Return the content of `shard` as it was at the end of `step`, to be sent to another rank.

        If `kept` is True, return the shard from the copy that `tft_backup` has made of `step`. If
        `kept` is False, `step` is the step of the present state: return the shard from the state in
        use, even if there is a copy of this step. The hook is called on a thread for transfers. The
        buffers of the result are read while the training thread is out of the loop.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Prepare memory for a shard that will be received. Return the writable buffers.

        `meta` is the description of the shard (`ShardPayload.meta`) from the rank that sends the
        shard. Return the buffers in the order in which that rank lists its buffers.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_taken(self, shard: str, meta: bytes) -> bool | None:
        """
        Use the received shard, whose content is now in the buffers of `tft_take`.

        All buffers have arrived, and their digests are correct. Return True if this adaptor puts
        the shard to use only in `tft_rebuild`, which all ranks call at the same time. Then the
        state of this rank counts as incomplete until `tft_rebuild` has returned. Otherwise return
        None or False.
        """

    @hookspec(firstresult=True)
    def tft_compare(self, shard: str) -> Mapping[str, str]:
        """
        Return a digest of each part of the shard that is in use on this rank, by the part's name.

        If all copies of the shard are equal, the digests must be equal on all ranks that hold the
        shard. For a part that belongs only to this rank, such as a buffer that the forward pass
        changes, return an empty digest. That part is then compared on no rank.

        In an incident, the hook is called out of the loop, on a thread of its own. The training
        thread may be in `tft_regroup` at the same time. The hook is also called on the training
        thread, in the loop, at the start and end of a step, while tft audits the loop. The audit
        checks in some steps whether the script follows the rules of tft. It reports parts that a
        script has changed between the end of a step and the next update window. Only the parts
        `description`, `settings`, `scheduler`, `modes` and `learning_rate` may be changed there.

        Not needed: without this hook tft computes the digests with `tft.spi.state.part_digests`
        from the result of `tft_give`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_slices(self, shard: str) -> SliceContent:
        """
        Return that content of the shard which must be equal on all ranks that hold the shard. Do
        not copy the content.

        Leave out what belongs to this rank alone, such as buffers that the forward pass changes.
        The hook is called on the training thread at the end of a step, if copies are compared while
        the job trains. The returned buffers are read until the next update window opens. If the
        result's `identity` has not changed for many steps, the hook is called less often. The
        buffers of the last result are then read at the ends of later steps, too.

        Not needed: without this hook copies are compared in incidents and checkpoints only.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_contribution(self) -> int | None:
        """
        Return a digest (64 bit) of the gradients that this rank alone has computed in the step that
        has ended, before the gradients were reduced. A digest of only some of the gradients is
        enough if these depend on the whole model.

        If two copies of a shard differ, the ranks compute the steps since the last equal copies
        again. A rank whose digest of a step is different the second time had the wrong copy. The
        hook is called at the end of each step, if copies are compared while the job trains and
        exactly two ranks hold one of the shards of this rank. The hook may return None until it has
        seen a whole step.

        Not needed: without this hook, if only two ranks hold a shard and their copies differ, tft
        cannot say which copy is wrong.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_generators(self) -> Mapping[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by the generator's name.

        Add a digest of the data position under the name `data`. The hook is called on the training
        thread when the user's function `train` is called. It is also called in steps that tft
        audits, and before and after functions that are called after a step, to check whether the
        script follows the rules of tft.

        Not needed: without this hook the audit does not notice a tail that draws random numbers, or
        a loop that draws a batch before the step of the batch begins. A function after a step that
        takes batches of the data is not noticed either.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_unkept(self) -> Mapping[str, str]:
        """
        Return what has changed since the last call in the user's objects and is neither saved nor
        restored, such as attributes of the model. Each name has a sentence for the user, which says
        what to do.

        The hook is called on the training thread at the ends of steps that tft audits.

        Not needed: without this hook such changes are not reported, unless the adaptor calls
        `session.unkept`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch_batches(self, seen: Callable[[str, str], None]) -> None:
        """
        From now on, call `seen(kind, digest)` for each input and each loss of a training step.

        `kind` is `batch` for the inputs of the model in a forward pass that is part of training,
        and `loss` for the value from which a backward pass begins. Call `seen` on the training
        thread, in the order of the script. The hook is called once, if digests are recorded
        (`--record-digests`).

        Not needed: without this hook, `tft verify` compares two runs only by their states.
        """

    @hookspec(firstresult=True)
    def tft_watch_collectives(
        self,
        entered: Callable[[], None] | None,
        failed: Callable[[BaseException, bool], None] | None,
    ) -> None:
        """
        Start to call `entered()` and `failed(error, raised)` around collectives of this process.

        Call `entered()` before this process enters a collective. When a collective fails, call
        `failed(error, True)` on the thread that raises the exception, or `failed(error, False)` if
        no thread raises it yet: it is the result of a future, for example. If an argument is None,
        stop calling the function that an earlier call of this hook has given for this argument.

        The hook is called on the training thread. `entered` is a function only during the tails of
        steps in which tft audits the script. `failed` stays set for the life of the process, so it
        must cost nothing to watch for errors while no collective fails.

        Not needed: without this hook tft does not notice a script that catches the error of a
        collective and continues, nor what a tail does after a collective.
        """

    @hookspec(firstresult=True)
    def tft_watch_work(self, computing: Callable[[], None]) -> WorkMeter | None:
        """
        Return an object that calls `computing()` when the first forward pass of a step begins, and
        tells how long the training thread has waited for other ranks.

        With both, tft measures how long each rank works in a step, and how long it waits for its
        data. The hook is called on the training thread, before `tft_adopt`, if a plugin has asked
        for it (`SessionView.measure_work`). `computing` is called on the training thread.

        Not needed: without this hook, or if the result is None, the work of ranks is not measured.
        """

    @hookspec(firstresult=True)
    def tft_digests(self) -> Mapping[str, str]:
        """
        Return a digest (XXH3-128, hexadecimal) of each part of this rank's state. The keys are
        `parameters`, `optimizer`, `scheduler`, `rng` and `data`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch_numbers(self, refuse: Callable[[float], bool]) -> bool:
        """
        Begin to record the losses and gradient norms of each step, which `tft_numbers` returns.

        Call `refuse(loss)` on the training thread with each value from which a backward pass
        begins. If the value is known before the pass and `refuse` returns True, make all gradients
        of this pass NaN. The reduced gradients then are NaN on all ranks, so that all ranks refuse
        the update. If the value is known only when a device has done its work, call `refuse` in
        `tft_numbers`.

        Return True if each refusal reaches all ranks through the gradients. If the result is False,
        tft calls `tft_pre_update_barrier` in every step to tell the other ranks of a refusal.

        The hook is called once, before training begins, if a plugin watches these losses and norms.

        Not needed: without this hook, tft refuses to run a job with such a plugin.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_numbers(self) -> Numbers:
        """
        Return the losses and gradient norms of the present step, and begin to record those of the
        next step.

        The hook is called on the training thread when an update window is about to open. If a step
        is interrupted before that, drop its losses and norms in `tft_rollback`. A backward pass in
        the tail of a step (after the update window) also gives losses: drop them in `tft_end_step`.

        The hook is needed if the adaptor has `tft_watch_numbers`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ process groups and wrappers

    @hookspec(firstresult=True)
    def tft_quiesce(self) -> None:
        """
        Make the training thread raise an exception if it waits in a collective or forms a process
        group.

        The hook is called on the control thread and must not block. It may be called although the
        training thread does not wait, and it may be called more than once.
        """

    @hookspec(firstresult=True)
    def tft_waiting(self, frame: FrameType) -> bool:
        """
        Return whether the training thread may be waiting for other ranks.

        `frame` is the innermost Python frame of the training thread. The hook is called on the
        control thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_collectives(self) -> Sequence[GroupStanding] | None:
        """
        Return, for each process group of this rank, how many collectives the rank has entered and
        which collective it is in now.

        Called on the control thread, when no rank of the job makes progress. The training thread is
        probably in a collective meanwhile, so do not wait for it.

        Not needed: without this hook tft knows only which ranks wait, and not in which collective.
        """

    @hookspec(firstresult=True)
    def tft_clear(self) -> None:
        """
        Drop the framework's wrappers and free the process groups.

        Before the hook is called, tft drops the tracebacks that refer to the process groups, so
        that nothing keeps the process groups alive.
        """

    @hookspec(firstresult=True)
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        """
        Form the process groups under `name`, with the rendezvous store at `host` and `port`.

        No earlier process groups had the same `name`. All ranks that take part call the hook at the
        same time. `world` is the number of ranks that take part, and `rank` is the number of this
        rank among them, from 0. When `tft_quiesce` is called, this hook must raise an exception
        soon. The hook must not change the training state, because `tft_compare` may read it on
        another thread at the same time.
        """

    @hookspec(firstresult=True)
    def tft_rebuild(self) -> Any:  # Any: the wrapper that the user's own function returns
        """
        Build the framework's wrapper of the model (for example DDP) again, and return it.

        At this point all copies of each shard are equal, and the hook must not change the state.
        Raise `StateChanged` if the state has changed nevertheless: this rank then counts as a rank
        without a copy of the state. A hook that is called later, such as `tft_rollback`, may raise
        this exception too.

        All settings that decide the order of gradient reduction must have the values that they had
        before the process groups were lost.
        """

    # ------------------------------------------------------------ checkpoints

    @hookspec(firstresult=True)
    def tft_save(
        self, directory: Path, shard: str, step: int, shards: Sequence[str], attempt: int
    ) -> Sequence[str]:
        """
        Write a shard, as it is at the end of `step`, to files under `directory`, and sync the
        files.

        Return the names of the written files, relative to `directory`. `shards` contains all shards
        that this rank writes for this checkpoint, including `shard`. `attempt` is the number of the
        attempt to write this checkpoint: if a rank is lost during an attempt, the next attempt is
        made with other ranks.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_stage(self, shard: str, step: int) -> Callable[[Path], Sequence[str]]:
        """
        Copy a shard, as it is at the end of `step`, to other memory. Return a function that writes
        the copy to files.

        The hook is called on the training thread, so it must be quick. The returned function takes
        a directory, writes the copy under it and returns file names, as `tft_save` does. It is
        called once, on another thread, while training goes on.

        Not needed: without this hook periodic checkpoints are not possible.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_join(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        """
        Write the files that combine the shards under `directory` into one checkpoint. Sync the
        files.

        Before this call, ranks have written each shard, as it was at the end of `step`, to files
        under `directory`. `files` lists these files. Other files under `directory` may be left over
        from an attempt that was killed. Return the names of the files that this hook has written.
        All names are relative to `directory`. The hook may be called again, also on another rank.

        Not needed: without this hook a checkpoint consists of separate files for each shard.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_newest(self, directory: Path, newest: Path | None, step: int) -> None:
        """
        Record `newest` where the framework looks for its newest checkpoint.

        `newest` is the newest checkpoint under `directory`; it contains the state at the end of
        `step`. None means that no checkpoint is left. Replace the framework's record atomically,
        because the hook may be called on several ranks, and more than once on one rank. The hook is
        called on the training thread, or on the thread that writes checkpoints.

        Not needed: without this hook only tft knows the newest checkpoint.
        """

    @hookspec(firstresult=True)
    def tft_load(self, directory: Path, shard: str) -> None:
        """
        Read a shard from `directory` and put it to use. `tft_save` wrote the shard, possibly in
        another process.
        """

    @hookspec(firstresult=True)
    def tft_reload(self) -> Callable[[int | None], int] | None:
        """
        Return a function that loads the newest checkpoint that the user's program has written
        itself, without tft.

        Return None if the program writes no such checkpoints.

        The argument of the returned function is a step or None. The function must not load a
        checkpoint of a later step, because the state after the given step may be wrong. None means
        that there is no such limit. The function loads the whole state of the newest checkpoint
        within the limit, including the RNG and the data position. It returns the step at whose end
        the checkpoint was written.

        The returned function is called on all ranks at the same time, after the process groups have
        been formed. All ranks must find the same checkpoint. When a job returns to an earlier step,
        the results of later steps are abandoned: their checkpoints must not be found.

        The hook is called when the rank is ready, and again each time a checkpoint of the user's
        program is to be loaded.

        Not needed: without this hook tft loads no checkpoints of the program.
        """

    @hookspec(firstresult=True)
    def tft_beside(self, shard: str) -> bytes:
        """
        Return, as bytes, the state that belongs to a shard but is not in the user's objects.

        An example is the order of gradient reduction. The bytes are stored next to the shard in the
        checkpoint. The hook is called on the training thread, if a function of the user writes the
        shard in place of `tft_save`, before that function is called. Raise `OrderRefused` if the
        user's objects do not contain the whole shard now.

        Not needed: without this hook and `tft_replaced` nothing is stored next to the shard.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_replaced(self, shard: str, beside: bytes) -> None:
        """
        React to a function of the user that has loaded a shard from a checkpoint into the user's
        objects.

        `beside` contains the bytes that `tft_beside` returned when the shard was written. Use them
        to restore the state that is not in the user's objects.

        Not needed: without this hook and `tft_beside` nothing is stored next to the shard.
        """

    # ------------------------------------------------------------ faults

    @hookspec(firstresult=True)
    def tft_classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        """
        Return the kind of fault that the framework's exception `error` means.

        Return a `Diagnosis` if the kind alone does not say enough. Return None if the adaptor does
        not know the exception. A `tft.TrainingFault` that declares a kind takes precedence over the
        result. The table of device faults, which maps error texts to kinds of faults, takes
        precedence too, except for a line that says that the error is a bug of the script. The hook
        is also called for each exception from which `error` was raised (its `__cause__` and
        `__context__`).
        """


NEEDED_HOOKS = (
    "tft_strategies", "tft_preload", "tft_store", "tft_watch", "tft_adopt", "tft_shards",
    "tft_capture", "tft_rollback", "tft_give", "tft_take", "tft_taken", "tft_digests",
    "tft_quiesce", "tft_waiting", "tft_clear", "tft_regroup", "tft_rebuild", "tft_save", "tft_load",
    "tft_classify",
)  # fmt: skip
"""The hooks that an adaptor must implement. tft refuses to start a rank with an adaptor that lacks
one of them."""
