"""
Implements the hooks that are the same for every adaptor whose ranks communicate through
torch.distributed.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Generic, Protocol, TypeVar

from tft.spi import (
    FaultKind,
    GroupStanding,
    LauncherStore,
    ShardPayload,
    SliceContent,
    StateHooks,
    TrainingState,
    WorkMeter,
    hookimpl,
)
from tft_pytorch import interruptible, watched
from tft_pytorch.backups import Backups, ShardInUse
from tft_pytorch.device import Devices
from tft_pytorch.groups import Groups
from tft_pytorch.waiting_time import waiting_time


class TorchState(TrainingState, Protocol):
    """
    The methods that the training state of an adaptor for torch needs in addition to those of
    `TrainingState`.
    """

    @property
    def devices(self) -> Devices: ...

    @property
    def backups(self) -> Backups: ...

    def in_use(self) -> Mapping[str, ShardInUse]: ...

    def restore(self, step: int) -> None: ...

    def updated(self) -> Callable[[], None] | None: ...

    def before_abort(self) -> None: ...

    def set_aside(self) -> Callable[[], None]: ...

    def slices(self, shard: str) -> SliceContent: ...

    def contribution(self) -> int | None: ...


class Forming(Protocol):
    """
    Forms and frees process groups, as `tft_pytorch.groups.Groups` does.
    """

    def form(
        self, name: str, host: str, port: int, rank: int, world: int, *, devices: Devices
    ) -> None: ...

    def clear(self) -> None: ...


State = TypeVar("State", bound=TorchState)


class TorchHooks(Generic[State]):
    """
    Implements hooks of an adaptor as methods. The main module of an adaptor assigns these methods
    to module-level names, as it does with the methods of `StateHooks`.
    """

    def __init__(
        self, hooks: StateHooks[State], groups: Groups, forming: Forming | None = None
    ) -> None:
        """
        The object `forming` forms and frees the process groups. If `forming` is None, the object
        `groups` does this. An adaptor whose job has more than one group at a time must pass
        `forming`.
        """
        self._hooks = hooks
        self._groups = groups
        self._forming = forming or groups
        self.contributing: Callable[[], None] | None = None
        """The function to call in each step when this rank is about to contribute to the last
        all-reduce of the step."""
        self.early = False
        """True if `contributing` is to be called at the end of each forward pass, too."""

    # ------------------------------------------------------------ the process

    @hookimpl
    def tft_store(self, host: str, port: int, opened: Callable[[int], None]) -> None:
        from tft_pytorch.store import serve

        serve(host, port, opened)

    @hookimpl
    def tft_begun(self) -> str | None:
        import torch.distributed as dist

        return "a process group (init_process_group)" if dist.is_initialized() else None

    @hookimpl
    def tft_launcher_store(self, host: str, port: int) -> LauncherStore:
        from tft_pytorch.store import TorchrunStore

        return TorchrunStore(host, port)

    # ------------------------------------------------------------ a step

    @hookimpl
    def tft_watch(self, contributing: Callable[[], None], early: bool) -> None:
        self.contributing, self.early = contributing, early

    @hookimpl
    def tft_watch_work(self, computing: Callable[[], None]) -> WorkMeter:
        waiting_time.begin(computing)
        return waiting_time

    @hookimpl
    def tft_watch_batches(self, seen: Callable[[str, str], None]) -> None:
        # imported here, because only jobs that record digests need this module
        from tft_pytorch.batches import watch_batches

        watch_batches(seen)

    @hookimpl
    def tft_pre_update_barrier(self, refuses: bool | None) -> bool:
        return self._groups.meet(refuses)

    @hookimpl
    def tft_asynchronous(self) -> bool:
        return self._hooks.state().devices.asynchronous

    @hookimpl
    def tft_synchronize(self, closing: bool) -> None:
        self._groups.synchronize(closing=closing)

    @hookimpl
    def tft_updated(self) -> None:
        self.complete(self._hooks.state().updated())

    def complete(self, exchanged: Callable[[], None] | None) -> None:
        """
        Call `exchanged` when the device has carried out the exchange of parameters that has begun.
        Do nothing if `exchanged` is None, because no exchange has begun.

        Raises `CalledOff` if the exchange may have been aborted.
        """
        if exchanged is None:
            return
        if self._hooks.state().devices.asynchronous:
            self._groups.synchronize(closing=True)
        exchanged()

    @hookimpl
    def tft_slices(self, shard: str) -> SliceContent:
        return self._hooks.state().slices(shard)

    @hookimpl
    def tft_contribution(self) -> int | None:
        return self._hooks.state().contribution()

    @hookimpl
    def tft_set_aside(self) -> Callable[[], None]:
        return self._hooks.state().set_aside()

    @hookimpl
    def tft_watch_collectives(
        self,
        entered: Callable[[], None] | None,
        failed: Callable[[BaseException, bool], None] | None,
    ) -> None:
        watched.watch(entered)
        interruptible.watch_failures(failed)

    # ------------------------------------------------------------ copies of earlier steps

    @hookimpl
    def tft_backup(self, step: int, sound: int, copies: int) -> Callable[[], None] | None:
        state = self._hooks.state()
        return state.backups.keep(step, state.in_use, state.devices, sound=sound, copies=copies)

    @hookimpl
    def tft_backups(self) -> Sequence[int]:
        state = self._hooks.adopted
        return () if state is None else state.backups.steps()

    @hookimpl
    def tft_restore(self, step: int) -> None:
        self._hooks.state().restore(step)

    @hookimpl
    def tft_give(self, shard: str, step: int, kept: bool) -> ShardPayload:
        state = self._hooks.state()
        return state.backups.give(shard, step) if kept else state.give(shard)

    @hookimpl
    def tft_rollback(self, local_state: bytes, step: int) -> str | None:
        state = self._hooks.state()
        state.backups.drop_after(step)
        return state.rollback(local_state)

    # ------------------------------------------------------------ groups

    def device_waits(self) -> bool:
        """
        Return whether the device of this rank has work to do, such as a collective that waits for
        other ranks. The script then waits too, as soon as it reads a result from the device.
        """
        state = self._hooks.adopted
        return state is not None and state.devices.asynchronous and not state.devices.idle()

    def result_of_abort(self, error: BaseException) -> FaultKind | None:
        """
        Return `network` if `error` may be a result of collectives that were aborted on a device of
        this rank, else None. Also return None if another exception explains `error`: `error` was
        raised from that exception, or while it was handled.

        The results of aborted collectives are wrong, and a script that checks them raises an
        exception. If a bug of the script has raised `error` instead, the bug raises it again when
        the step is computed again.
        """
        context = None if error.__suppress_context__ else error.__context__
        explained = error.__cause__ is not None or context is not None
        return "network" if self._groups.aborted and not explained else None

    @hookimpl
    def tft_quiesce(self) -> None:
        state = self._hooks.adopted
        if state is not None and state.devices.asynchronous:
            state.before_abort()
        self._groups.quiesce()

    @hookimpl
    def tft_collectives(self) -> Sequence[GroupStanding]:
        state = self._hooks.adopted
        return () if state is None else self._groups.standings(state.devices)

    @hookimpl
    def tft_clear(self) -> None:
        state = self._hooks.adopted
        if state is not None:
            if state.devices.asynchronous:
                # The script may have left its loop by an exception while the device still waits for
                # other ranks. `clear` copies buffers, and the copy waits for the device. So end the
                # waits of the device first.
                self._groups.quiesce()
            state.clear()
        self._forming.clear()
        if state is not None:
            # From now on other threads read the state, in streams of their own. So the devices must
            # have done their work. An error of a lost device is ignored, because the next read of
            # that device raises it again.
            with suppress(RuntimeError):
                state.devices.synchronize()

    @hookimpl
    def tft_regroup(self, name: str, host: str, port: int, rank: int, world: int) -> None:
        devices = self._hooks.state().devices
        self._forming.form(name, host, port, rank, world, devices=devices)
