"""
The hook specifications of an adaptor.

An adaptor knows one framework. A worker loads exactly one adaptor, by name. The worker calls its
hooks on the training thread while that thread is out of the training loop, unless a hook says
otherwise. If a hook of an adaptor raises an exception, the order that the hook served fails, and
the controller decides what to do next.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from tft.protocol.messages import FaultKind, ShardCopies
from tft.spi.markers import hookspec
from tft.spi.types import Buffer, Diagnosis, LauncherStore, ShardPayload


class AdaptorSpecs:
    """
    The hooks of an adaptor.

    An adaptor must implement all of them, except the hooks marked "Not needed".
    """

    # ------------------------------------------------------------ the process

    @hookspec(firstresult=True)
    def tft_strategies(self) -> Sequence[str]:
        """
        Return the strategies that this adaptor supports, out of `retry`, `recover`, `scale_in`,
        `scale_out`, `migrate`, `dump`.

        Called in `tft.init`, again when this rank is ready, and again before process groups are
        formed without ranks that have left.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_preload(self) -> None:
        """
        Import the modules that the framework imports late, before the user's script starts.

        A replacement starts while the other ranks wait. A module that is imported here need not be
        imported after the replacement has joined.
        """

    @hookspec(firstresult=True)
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        """
        Serve the rendezvous store at `host` and `port` until the process is ended.

        The hook runs in a process of its own. Call `opened(port)` once the store accepts
        connections. `port` 0 asks for a free port.
        """

    # ------------------------------------------------------------ under another launcher

    @hookspec(firstresult=True)
    def tft_begun(self) -> str | None:
        """
        Return a text that names what the framework has already started in this process and what
        ties it to other processes, such as a process group; None if there is nothing.

        The process is about to become a `tft run`, and the other processes would wait for it for
        ever. Not needed: without this hook tft assumes that the framework has started nothing.
        """

    @hookspec(firstresult=True)
    def tft_launcher_store(self, host: str, port: int) -> LauncherStore:
        """
        Return the store that the framework's own launcher serves at `host` and `port`.

        Raise a `UsageError` if the store does not answer. Not needed: only for an adaptor whose
        framework has such a launcher.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ the state

    @hookspec(firstresult=True)
    def tft_adopt(
        self,
        parts: Mapping[str, Any],  # Any: the framework's own objects
        wrap: Callable[[], Any] | None,
    ) -> None:
        """
        Take charge of the user's objects.

        `parts` has `model` and `optimizer`, and may have `scheduler` and `data`. `wrap` builds the
        wrapper (DDP) around the model; None: there is no wrapper. Other named arguments of
        `session.adopt` are in `parts`, too. If the adaptor cannot handle an object or does not know
        its name, raise a `UsageError` before anything is changed.
        """

    @hookspec(firstresult=True)
    def tft_shards(self, rank: int, world: int) -> Sequence[ShardCopies]:
        """
        Return the shards that this rank holds, each with all ranks that hold a copy of it.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_column(self, rank: int, world: int) -> Sequence[int]:
        """
        Return the model replica of this rank: the ranks, this one included, that can leave and
        return only together when the job goes on with fewer ranks.

        Not needed: without this hook each rank leaves alone.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_capture(self, closing: bool) -> bytes:
        """
        Return the rank-local state of this rank: RNG and data position.

        Called at the edges of every update window, so the hook may take a few microseconds and must
        not synchronise the device. `closing`: the window closes, and the step with it.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch(self, contributing: Callable[[], None]) -> None:
        """
        Arrange that `contributing()` is called on the training thread in every step: after this
        rank has drawn its batch and its random numbers, and before it contributes to the last
        all-reduce of the step.

        From that moment on the other ranks can finish the step without this rank. If this rank dies
        later, its replacement continues with the rank-local state of that moment. This hook is
        called once, before `tft_adopt`.
        """

    @hookspec(firstresult=True)
    def tft_rollback(self, private: bytes) -> None:
        """
        Restore the rank-local state that `tft_capture` returned, in this process or in the process
        that held this rank before. Drop the gradients.
        """

    @hookspec(firstresult=True)
    def tft_skip(self, batches: int) -> None:
        """
        Draw this number of batches and drop them, after a rollback.

        Not needed: without this hook no batch can be left out.
        """

    @hookspec(firstresult=True)
    def tft_derive(self, step: int) -> bytes:
        """
        Make the rank-local state of this rank at the end of `step` anew, in the form in which
        `tft_capture` returns it.

        Called when the captured state was lost with a node, or when the rank returns after the
        other ranks went on without it. Make unknown parts (the RNG) as at a fresh start. Not
        needed: without this hook such a rank cannot go on, and no state is invented.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_pre_update_barrier(self) -> None:
        """
        Wait until the all-reduces of the step are complete on all ranks (pre-update barrier).

        Called in every step in which some shard is not on all ranks, when this rank's all-reduces
        are complete and its update window is about to open. Raise an exception if the state of the
        other ranks cannot be known any more. Not needed where the ranks cannot get apart: without
        this hook a rank may complete a step that holders of other shards cannot complete.
        """

    @hookspec(firstresult=True)
    def tft_updated(self) -> None:
        """
        Give the other ranks the part of the step that only this rank has computed.

        Called in every step, when the update window has closed on this rank. The hook may wait for
        the other ranks. A failure here counts as a fault in the next step. Not needed: without this
        hook every rank computes the whole step.
        """

    @hookspec(firstresult=True)
    def tft_end_step(self, tail: bool) -> bytes | None:
        """
        Note the settings that a script may change at the head of its next iteration, such as the
        learning rate or the modes of modules.

        Called in every step, when the step has ended with its tail (the code of the loop after the
        update window). If the loop is left later, `tft_clear` restores the noted settings, so that
        all ranks hold the same.

        Return the rank-local state anew if something that belongs to the end of the step has
        changed since `tft_capture(closing=True)`; keep RNG and data position as they were then.
        Else return None. `tail` True: the loop has marked the end of the step. `tail` False: the
        window has just closed, and the tail is still to come. Not needed: without this hook no
        setting is restored.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_set_aside(self) -> Callable[[], None]:
        """
        Return a function that restores the random generators and the modes of modules to their
        present state.

        Called before a function of the user that is no part of training. Not needed: without this
        hook the random numbers that such a function draws are missing in training.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_backup(self, step: int) -> None:
        """
        Keep a copy of the whole state at the end of `step`, and give up the oldest copy.

        Called in every step, when `step` is complete. Not needed: without this hook no copy is
        kept, and the next two hooks are not called.
        """

    @hookspec(firstresult=True)
    def tft_backups(self) -> Sequence[int]:
        """
        Return the steps of which a copy of the whole state at their end is kept.

        Called on any thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_restore(self, step: int) -> None:
        """
        Restore the state from the copy of the end of `step`. Keep the copy.
        """

    @hookspec(firstresult=True)
    def tft_give(self, shard: str, step: int) -> ShardPayload:
        """
        Return the shard as it was at the end of `step`: of the present state, or of one of the
        copies of `tft_backups`.

        Called on a transfer thread. The buffers are read while the training thread is out of the
        loop.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        """
        Make room for a shard with this `meta`. Return the writable buffers, in the giver's order.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_taken(self, shard: str, meta: bytes) -> bool | None:
        """
        Use the shard that was written into the buffers of `tft_take`. All buffers have arrived, and
        their digests are correct.

        Return True if the shard is moved only in `tft_rebuild`, which all ranks call at once. Until
        `tft_rebuild` has returned, this rank's state then counts as torn.
        """

    @hookspec(firstresult=True)
    def tft_compare(self, shard: str) -> Mapping[str, str]:
        """
        Return the digests of the shard as this rank has it in use, by part.

        The digests must be equal on all holders of the shard. For a part that is this rank's own,
        such as a buffer that the forward pass changes, return an empty digest. That part is then
        compared on no rank. `tft.spi.state.part_digests` computes digests from the result of
        `tft_give`; tft uses that function if this hook is missing. An adaptor that keeps copies
        needs this hook when its `tft_give` may read a copy of the present step.

        Called on the training thread, out of the loop. While the loop is audited, also in the loop,
        at the edges of a step. There, a change between the end of a step and the next update window
        is no finding in the parts `description`, `settings`, `scheduler`, `modes` and
        `learning_rate`.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_generators(self) -> Mapping[str, str]:
        """
        Return a digest of each random generator in the rank-local state, by its name, and under
        `data` a digest of the data position.

        Called on the training thread, when the user's function is called, and in the loop of
        audited steps. Not needed: without this hook the audit does not notice a tail that draws
        random numbers, nor a loop that takes its batches ahead.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_watch_collectives(
        self,
        entered: Callable[[], None] | None,
        failed: Callable[[BaseException], None] | None,
    ) -> None:
        """
        From now on call `entered()` before this process enters a collective, and `failed(error)`
        when a collective raises. None: stop calling that function.

        Called on the training thread. `entered` is given in audited tails only. `failed` is given
        for the life of the process, and must cost nothing while no collective fails. Not needed:
        without this hook the audit does not see what a tail does after a collective, nor a tail
        that swallows the error of a collective.
        """

    @hookspec(firstresult=True)
    def tft_digests(self) -> Mapping[str, str]:
        """
        Return digests (XXH3-128, hexadecimal) of `parameters`, `optimizer`, `scheduler`, `rng` and
        `data`.
        """
        raise NotImplementedError

    # ------------------------------------------------------------ groups and wrappers

    @hookspec(firstresult=True)
    def tft_quiesce(self) -> None:
        """
        Interrupt the training thread in any collective and in the forming of a process group, so
        that it raises an exception there.

        Called on the control thread. Must not block. May be called when nothing hangs, and more
        than once.
        """

    @hookspec(firstresult=True)
    def tft_waiting(self, frame: FrameType) -> bool:
        """
        Return whether the training thread may be waiting for other ranks.

        `frame` is the innermost Python frame of the training thread. Called on the control thread.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_clear(self) -> None:
        """
        Drop the wrappers and really free the process groups. No traceback refers to them any more.
        """

    @hookspec(firstresult=True)
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        """
        Form the process groups under `name`, which no earlier group had, with the store at `host`
        and `port`.

        All members call the hook at the same time. `rank` is the place of this rank among the
        members, `world` their number. The hook must end early, with an exception, when
        `tft_quiesce` is called.
        """

    @hookspec(firstresult=True)
    def tft_rebuild(self) -> Any:  # Any: the user's own wrapper
        """
        Build the wrapper that the training loop calls anew, and return it.

        The state of all ranks is equal at this point, and the hook must not change it. All settings
        that decide the order of gradient reduction must be as they were before the process groups
        were lost.
        """

    # ------------------------------------------------------------ checkpoints

    @hookspec(firstresult=True)
    def tft_save(
        self, directory: Path, shard: str, step: int, shards: Sequence[str], attempt: int
    ) -> Sequence[str]:
        """
        Write one copy of a shard, as it is at the end of `step`, under `directory`, and sync it.

        Return the names of the written files, relative to `directory`. `shards` are all shards that
        this rank writes for this checkpoint, this one included. A later `attempt` is made with
        other ranks when a rank was lost while the checkpoint was written.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_stage(self, shard: str, step: int) -> Callable[[Path], Sequence[str]]:
        """
        Copy a shard as it is at the end of `step`, and return a function that writes the copy.

        Called on the training thread, so it must be quick. The returned function writes the copy
        under a directory as `tft_save` would. It is called once, on another thread, while training
        goes on. Needed for periodic checkpoints.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_join(self, directory: Path, files: Sequence[str], step: int) -> Sequence[str]:
        """
        Write the files that join the shards under `directory` into one checkpoint, and sync them.

        All shards have been written there, each by one of its holders, as they were at the end of
        `step`. Return the names of the written files, relative to `directory`. `files` are the
        files that belong to the checkpoint, relative to `directory`; other files may be left of an
        attempt that was killed. The hook may be called again, also on another rank. Not needed:
        without this hook the shards are stored next to each other.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_newest(self, directory: Path, newest: Path | None, step: int) -> None:
        """
        Record `newest` in the place where the framework looks up its newest checkpoint.

        `newest` is the newest checkpoint under `directory` from now on; it is of the end of `step`.
        None: no checkpoint is left, all have been given up. Replace the record atomically: the hook
        may be called on several ranks, and more than once on one rank. Called on the training
        thread, or on the thread that writes checkpoints. Not needed: without this hook only tft
        knows the newest checkpoint.
        """

    @hookspec(firstresult=True)
    def tft_load(self, directory: Path, shard: str) -> None:
        """
        Read a shard that `tft_save` wrote, possibly in another process.
        """

    @hookspec(firstresult=True)
    def tft_reload(self) -> Callable[[int | None], int] | None:
        """
        Return a function that loads the newest checkpoint that the program keeps itself and that
        tft does not know; None if there are no such checkpoints.

        The argument of the function is the step after which all state may be wrong (None: no state
        is wrong). The function finds the newest checkpoint that is not later, and loads the whole
        state with RNG and data position. It returns the step of whose end the checkpoint is.

        The function is called on all ranks at once, when the process groups are formed. All ranks
        must find the same checkpoint. They must not find a checkpoint of a step that was given up
        by a return to an earlier step. The hook is called when the rank is ready, and again each
        time such a checkpoint is to be loaded. Not needed: without this hook there are no such
        checkpoints.
        """

    @hookspec(firstresult=True)
    def tft_beside(self, shard: str) -> bytes:
        """
        Return the state, as bytes, that must be stored next to a shard but that is no part of the
        objects that the user handed over, such as the order of gradient reduction.

        Called on the training thread, before a function of the user writes the shard in place of
        `tft_save`. Raise `OrderRefused` if those objects do not have all of the shard now. Not
        needed: without this hook and the next one there is no such state.
        """
        raise NotImplementedError

    @hookspec(firstresult=True)
    def tft_replaced(self, shard: str, beside: bytes) -> None:
        """
        Take note that a function of the user has loaded new content into the user's objects of a
        shard.

        `beside` is the result of `tft_beside` when the shard was written.
        """

    # ------------------------------------------------------------ faults

    @hookspec(firstresult=True)
    def tft_classify(self, error: BaseException) -> FaultKind | Diagnosis | None:
        """
        Return the kind of fault that an exception of the framework means, or a `Diagnosis` with
        more facts; None if the adaptor does not know the exception.

        tft has already checked the table of device faults and the attributes of the exception, such
        as `tft_fault_kind`. For the exceptions from which this one was raised, the hook is called
        separately.
        """


NEEDED_HOOKS = (
    "tft_strategies", "tft_preload", "tft_store", "tft_watch", "tft_adopt", "tft_shards",
    "tft_capture", "tft_rollback", "tft_give", "tft_take", "tft_taken", "tft_digests",
    "tft_quiesce", "tft_waiting", "tft_clear", "tft_regroup", "tft_rebuild", "tft_save", "tft_load",
    "tft_classify",
)  # fmt: skip
"""The hooks that an adaptor must implement. A rank of an adaptor without one of them is refused."""
