"""
The order executor of a worker.

It carries out each order of an incident with the adaptor's hooks, on the training thread.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol, assert_never

import pluggy
import structlog

from tft import checkpoint
from tft.checkpoint import CheckpointStore
from tft.clock import SystemClock
from tft.config import ranks_on_node
from tft.errors import OrderRefused, StateChanged
from tft.page import Page
from tft.protocol.messages import (
    ORDER_NAMES,
    Check,
    Commit,
    Compare,
    Complete,
    End,
    Fetch,
    Freeze,
    Hold,
    Load,
    RankOrder,
    Rebuild,
    Regroup,
    Release,
    Reload,
    Restore,
    Resume,
    Rollback,
    Save,
    SavedFile,
    Stop,
    Verdict,
)
from tft.spi.digests import with_cores
from tft.spi.state import part_digests
from tft.spi.types import Buffer, CheckResult, ShardPayload
from tft.transfer.client import Receiver, fetch
from tft.transfer.tls import Tls
from tft.worker.saving import Saving
from tft.worker.slices import Slices
from tft.worker.step_gate import Gate

log = structlog.get_logger()

NOT_CAPTURED = -1
"""The step number that stands for "no step": no rank-local state was captured when the loop was
left.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """
    The result of an order that this rank has carried out: the fields of its answer to the
    controller.
    """

    files: tuple[SavedFile, ...] = ()
    verdict: Verdict = "pass"
    finding: str = ""
    local_state: dict[int, str] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    compared: float = 0.0
    """The time in seconds that the computation of `digests` took."""
    line: str = ""
    odd: dict[int, str] = field(default_factory=dict)
    lost: str = ""


class SessionState(Protocol):
    """
    The attributes of the session that `Hands` reads and writes.
    """

    model: object

    @property
    def rank(self) -> int:
        """The number of this rank in the job."""

    @property
    def world(self) -> int:
        """The number of ranks of the job."""

    @property
    def job(self) -> str:
        """The job's name. The shard servers of other ranks send nothing to a client that gives
        another name."""

    @property
    def tls(self) -> Tls | None:
        """The TLS settings of shard transfers. None means that transfers are not encrypted."""

    @property
    def checkpoints(self) -> CheckpointStore:
        """The store in which this run keeps its checkpoints."""

    @property
    def adaptor(self) -> str:
        """The adaptor's name."""


class Hands:
    """
    Carries out the orders of one rank, on its training thread. `check(name)` runs the check with
    this name, which a plugin provides. It returns None if no plugin has such a check.
    """

    def __init__(
        self,
        state: SessionState,
        gate: Gate,
        hook: pluggy.HookRelay,
        page: Page,
        saving: Saving,
        check: Callable[[str], CheckResult | None],
    ) -> None:
        self._state = state
        self._gate = gate
        self._hook = hook
        self._page = page
        self._saving = saving
        self._check = check
        self.slices = Slices(hook, page)
        """Digests slices of the shards of this rank while the rank trains, so that its copies can
        be compared with the copies of other ranks."""
        self._interrupted: tuple[int, bytes] = (NOT_CAPTURED, b"")
        self._line = ""
        """The line (FILE:LINE) at which the loop was left. The line is reported if the loop was in
        the tail of a step (after its update window)."""
        self._stopped_for: int | None = None
        """The incident for which the loop was left. None: the loop was not left, or the `Stop`
        order of its incident has not arrived yet."""
        self._fetching: frozenset[str] = frozenset()
        """The shards that this rank is fetching now. Until they are complete, this rank does not
        give these shards to other ranks."""
        self._at_end: tuple[int | None, Work] | None = None
        """The last step of a loop that has ended, and the digests of the state at that moment.
        None: the loop has not ended, or an incident has begun since then."""
        self._grouped: tuple[int, int] | None = None
        """The incident and the round of the last order to form process groups. None: there was no
        such order since groups were dropped."""
        self._promised: int | None = None
        """The step of the fetched state, if this state is complete only after `tft_rebuild`. None:
        the state is complete already, or nothing was fetched."""

    def interrupted(self, step: int, local_state: bytes, line: str) -> None:
        """
        Record that the loop was left in the middle of `step`, and the rank-local state at that
        moment. `step` is `NOT_CAPTURED` if this state could not be captured.

        If this rank has contributed to all all-reduces of `step`, the other ranks may complete the
        step. Then `local_state` is also the rank-local state at the end of `step`. `line` is the
        line (FILE:LINE) of the script at which the loop was left, or empty if it is not known.
        """
        self._interrupted, self._stopped_for = (step, local_state), None
        self._line = line

    def carry_out(self, order: RankOrder) -> Work:
        """
        Carry out an order and return the result. Raises an exception if the order fails.

        If the adaptor raises `StateChanged`, because its state has changed since the ranks compared
        their copies, this rank counts as having no complete state from then on.
        """
        try:
            return self._carry_out(order)
        except StateChanged:
            self._gate.tear()
            raise

    def _carry_out(self, order: RankOrder) -> Work:
        if isinstance(order, Load | Fetch | Restore | Regroup | Reload | Save):
            self._drop_unused_groups(order)
        match order:
            case Stop():
                if self._stopped_for is None:
                    self._stopped_for = order.incident
                self._promised = self._at_end = None
                self._drop_groups()
                return Work(line=self._line if self._gate.in_tail else "")
            case Compare():
                # the script may have changed the state after its loop, so use the digests from the
                # end of the loop
                if self._at_end is not None and self._at_end[0] == self._gate.held():
                    return self._at_end[1]
                return self._compared()
            case Load():
                self._load(order)
            case Fetch():
                odd = self._fetch(order)
                return replace(self._compared(alone=True), odd=odd)
            case Restore():
                self._restore(order)
                return self._compared()
            case Regroup():
                self._regroup(order)
            case Reload():
                self._reload(order)
                return self._compared()
            case Rebuild():
                self._state.model = self._hook.tft_rebuild()
                if self._promised is not None:
                    self._hold(self._promised)
                    self._promised = None
            case Rollback():
                return Work(lost=self._rollback(order))
            case Check():
                return self._checked(order)
            case Save():
                return Work(files=self._save(order))
            case Commit():
                self._commit(order)
            case Freeze() | Hold() | Release() | Resume() | Complete() | End():
                raise OrderRefused(
                    f"the training thread cannot carry out the order {ORDER_NAMES[type(order)]}"
                )
            case _:
                assert_never(order)
        return Work()

    def _drop_groups(self) -> None:
        # `model` is the last reference outside the adaptor to the old wrapper of the model (such as
        # DDP). Drop it now: if the wrapper were freed later, its process group would be destroyed
        # while the new process group is in use
        self._state.model = None
        self._grouped = None
        self._hook.tft_clear()

    def _drop_unused_groups(self, order: RankOrder) -> None:
        """
        Drop process groups that this rank has formed early, or has begun to form, for an earlier
        round than that of `order`. They are of no use now, because the controller has chosen
        another strategy. It has sent no further `Stop` order, which would have dropped the groups.
        """
        if self._grouped is None or self._grouped == (order.incident, order.round):
            return
        try:
            self._drop_groups()
        except Exception:
            if not isinstance(order, Save):
                raise
            # a last checkpoint may be possible nevertheless
            log.warning("groups_not_dropped", exc_info=True)

    def _compared(self, *, alone: bool = False) -> Work:
        """
        Return digests of the state that this rank holds, for the comparison with other ranks.
        `alone` is True if most ranks of the node compute no digests at the same time.

        If this rank cannot read its state, return no digests. The controller then does not use this
        rank as a source.
        """
        step, began = self._gate.held(), SystemClock().now()
        digests: dict[str, dict[str, str]] = {}
        try:
            if step is not None:
                with with_cores(cores_for_digests(alone=alone)):
                    digests = self.digests()
        except Exception:
            log.warning("state_not_compared", step=step, exc_info=True)
            digests = {}
        seconds = SystemClock().now() - began if digests else 0.0
        return Work(digests=digests, compared=seconds)

    def ends(self) -> None:
        """
        Digest the state at the end of the loop, and keep the digests for the comparison before the
        job completes. They are computed now, because the script may change the state after its
        loop.
        """
        self._at_end = self._gate.held(), self._compared()

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Return digests of the present training state, by shard and part. Call this only while the
        state is complete.
        """
        shards = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        return {each.shard: dict(self._parts(each.shard, self._gate.held())) for each in shards}

    def _parts(self, shard: str, step: int | None) -> Mapping[str, str]:
        if self._hook.tft_compare.get_hookimpls():
            parts: Mapping[str, str] = self._hook.tft_compare(shard=shard)
            return parts
        return part_digests(self._hook.tft_give(shard=shard, step=step, kept=False))

    def give(self, shard: str, step: int) -> ShardPayload:
        """
        Return a shard at the end of `step`, to be sent to another rank. Runs on a transfer thread.

        Raises `OrderRefused` if this rank has neither the state of `step` nor a copy of it, or if
        this rank is fetching the shard itself.
        """
        held, backups = self._gate.held(), self._gate.backups()
        if step != held and step not in backups:
            raise OrderRefused(
                f"rank {self._state.rank} cannot give shard {shard!r} of step {step} to another "
                f"rank: its state is of step {held}, and its copies in host memory are of steps "
                f"{list(backups)}"
            )
        if shard in self._fetching:
            raise OrderRefused(
                f"rank {self._state.rank} cannot give shard {shard!r} to another rank, because it "
                "is fetching that shard itself"
            )
        payload: ShardPayload = self._hook.tft_give(shard=shard, step=step, kept=step != held)
        return payload

    def _restore(self, order: Restore) -> None:
        if order.step not in self._gate.backups():
            raise OrderRefused(
                f"rank {self._state.rank} keeps no copy of step {order.step} in host memory"
            )
        self._gate.tear()
        self._hook.tft_restore(step=order.step)
        self._hold(order.step)

    def _regroup(self, order: Regroup) -> None:
        if order.without and "scale_in" not in self._hook.tft_strategies():
            raise OrderRefused(
                f"the adaptor {self._state.adaptor!r} cannot form process groups without ranks "
                f"{list(order.without)}"
            )
        self._grouped = (order.incident, order.round)
        members = [rank for rank in range(self._state.world) if rank not in order.without]
        self._hook.tft_regroup(
            name=order.name,
            host=order.host,
            port=order.port,
            rank=members.index(self._state.rank),
            world=len(members),
        )

    def left_to_save(self) -> Work:
        """
        Return the captures of this rank's rank-local state, by step, so that another rank can write
        this state to the last checkpoint.

        Called when this rank has failed to write its rank-local state itself. No other rank has
        this state.
        """
        kept = self._page.local_states()
        return Work(local_state={step: captured.hex() for step, captured in kept.items()})

    def _rollback(self, order: Rollback) -> str:
        """
        Restore the rank-local state. If a part of it was lost, return a sentence that says so,
        otherwise an empty text.
        """
        local_state = self._local_state(order)
        # `_hold` also marks the tail of the step as complete, because all ranks return to the end
        # of the step
        self._hold(order.step)
        self._page.forget_after(order.step, (order.incident, order.round))
        self._give_up_checkpoints(order)
        lost = self._hook.tft_rollback(local_state=local_state, step=order.step)
        if order.skip:
            if not self._hook.tft_skip.get_hookimpls():
                raise OrderRefused(f"the adaptor {self._state.adaptor!r} cannot skip batches")
            # the state after the skip is not captured: a repeated rollback must return to the state
            # before the skip, and then skip again
            self._hook.tft_skip(batches=order.skip)
        return lost or ""

    def _give_up_checkpoints(self, order: Rollback) -> None:
        """
        Set the checkpoints of later steps aside. If the file system cannot be read, raise `OSError`
        only if there may be such checkpoints: a later run would continue from one of them.
        """
        try:
            self._saving.give_up(self._state.checkpoints, order.step)
        except OSError as error:
            if order.goes_back:
                raise
            log.warning("checkpoints_not_readable", why=str(error))

    def _checked(self, order: Check) -> Work:
        result = self._check(order.name)
        if result is None:
            raise OrderRefused(f"no installed plugin has a check named {order.name!r}")
        return Work(verdict=result.verdict, finding=result.finding)

    def _fetch(self, order: Fetch) -> dict[int, str]:
        """
        Fetch shards from other ranks. Return the sources that have failed, by rank, each with the
        reason.
        """
        shards = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        fetched = frozenset(transfer.shard for transfer in order.transfers)
        if self._gate.held() != order.step or {each.shard for each in shards} <= fetched:
            self._gate.tear()
        # if this rank fetches only some of its shards, and already has its other shards of this
        # step, do not mark its state as torn: other ranks may need to fetch these other shards from
        # this rank
        self._fetching = fetched
        try:
            return self._fetch_all(order)
        except BaseException:
            self._gate.tear()
            raise
        finally:
            self._fetching = frozenset()

    def _fetch_all(self, order: Fetch) -> dict[int, str]:
        promised: list[str] = []
        odd: dict[int, str] = {}
        state = self._state
        receiver = Receiver(job=state.job, rank=state.rank, tls=state.tls)
        for transfer in order.transfers:
            odd |= fetch(
                transfer,
                order.step,
                receiver,
                take=partial(self._hook_take, transfer.shard),
                taken=partial(self._hook_taken, transfer.shard, promised),
                abandoned=self._gate.abandoned,
            )
        # if `promised` is not empty, the adaptor moves these shards into place only in
        # `tft_rebuild`: until then, other ranks must not fetch state from this rank
        if promised:
            self._promised = order.step
        else:
            self._hold(order.step)
        return odd

    def _hook_take(self, shard: str, meta: bytes) -> Sequence[Buffer]:
        buffers: Sequence[Buffer] = self._hook.tft_take(shard=shard, meta=meta)
        return buffers

    def _hook_taken(self, shard: str, promised: list[str], meta: bytes) -> None:
        if self._hook.tft_taken(shard=shard, meta=meta):
            promised.append(shard)

    def _load(self, order: Load) -> None:
        self._gate.tear()
        directory = Path(order.directory)
        copies = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        shards = [each.shard for each in copies]
        self._saving.load(directory, shards, self._state.rank, order.step)
        if (
            directory.parent == self._state.checkpoints.directory
        ):  # the loaded checkpoint is of this run, and its newest now: later ones are set aside
            self._hook.tft_newest(directory=directory.parent, newest=directory, step=order.step)
        local_state = checkpoint.read_local_state(directory, self._state.rank)
        self._page.capture(order.step, local_state, True)
        self._hold(order.step)

    def _reload(self, order: Reload) -> None:
        """
        Let the script load a checkpoint that it has written itself, and capture the rank-local
        state.

        Raises `OrderRefused` if the script has no function for that, or if the function does not
        return a valid step.
        """
        reload = self._hook.tft_reload()
        if reload is None:
            raise OrderRefused(
                "the script writes checkpoints of its own, but has given the adaptor "
                f"{self._state.adaptor!r} no function that loads them"
            )
        self._gate.tear()
        step = reload(order.not_after)
        if not isinstance(step, int) or step < 0:
            raise OrderRefused(
                f"the function that loads the script's own checkpoint returned {step!r}, which is "
                "not a step number"
            )
        self._page.capture(step, self._hook.tft_capture(closing=False), True)
        self._hold(step)

    def _hold(self, step: int) -> None:
        self._gate.hold(step)
        self._page.move(step, False, SystemClock().now())

    def _local_state(self, order: Rollback | Save) -> bytes:
        """
        Return the rank-local state at the end of the order's step.

        The state was captured by this process or by an earlier process of the rank, or it is in the
        order. A capture that was made when the loop was left is used only in the incident for which
        the loop was left. In a later incident, the other ranks may have completed that step without
        this rank. Raises `OrderRefused` if there is no state of the step.
        """
        step = order.step
        if isinstance(order, Rollback) and self._state.rank in order.derive:
            return self._derived(step)
        captured = self._page.local_states().get(step)
        if captured is not None:
            return captured
        if step == self._interrupted[0] and order.incident == self._stopped_for:
            # keep the capture on the page (the shared memory of the rank): from now on it is the
            # rank-local state from which this rank trains
            if isinstance(order, Rollback):
                self._page.capture(step, self._interrupted[1], True)
            return self._interrupted[1]
        # there is no capture of step 0: capture the state that the script has set up
        if step == 0:
            fresh: bytes = self._hook.tft_capture(closing=False)
            self._page.capture(0, fresh, True)
            return fresh
        if isinstance(order, Rollback) and self._state.rank in order.local_state:
            sent = bytes.fromhex(order.local_state[self._state.rank])
            self._page.capture(step, sent, True)
            return sent
        raise OrderRefused(
            f"rank {self._state.rank} has no RNG state and data position of step {step}; it has "
            f"those of steps {sorted(self._page.local_states())}"
        )

    def _derived(self, step: int) -> bytes:
        """
        Create a new rank-local state for `step` from the number of the step (`tft_derive`), and
        return it.

        Used when the captured state is lost, or when the other ranks have continued without this
        rank. Raises `OrderRefused` if the adaptor cannot create a rank-local state.
        """
        if not self._hook.tft_derive.get_hookimpls():
            raise OrderRefused(
                f"the adaptor {self._state.adaptor!r} cannot create a new RNG state and data "
                "position"
            )
        derived: bytes = self._hook.tft_derive(step=step)
        self._page.capture(step, derived, True)
        return derived

    def _save(self, order: Save) -> tuple[SavedFile, ...]:
        directory = checkpoint.partial(Path(order.directory))
        directory.mkdir(parents=True, exist_ok=True)
        # if no copies are wanted in this attempt, remove those of an earlier attempt, which may
        # have filled the disk
        if not order.copies:
            shutil.rmtree(checkpoint.copy_of(directory, self._state.rank), ignore_errors=True)
        save = partial(self._saving.save, step=order.step, shards=order.shards, attempt=order.round)
        files = [
            checkpoint.digest_file(directory, name)
            for shard in order.shards
            for name in save(directory, shard)
        ]
        copies = [
            checkpoint.digest_file(directory, name)
            for shard in order.copies
            for name in self._saving.copy(directory, shard, order.step, self._state.rank)
        ]
        files += copies
        if order.writes_own:
            own = self._local_state(order)
            files.append(checkpoint.write_local_state(directory, self._state.rank, own))
        for rank, local_state in order.local_state.items():
            files.append(checkpoint.write_local_state(directory, rank, bytes.fromhex(local_state)))
        return tuple(files)

    def _commit(self, order: Commit) -> None:
        final = Path(order.directory)
        partial = checkpoint.partial(final)
        # if this order is a repetition, the checkpoint may have its final name already
        there = partial if partial.exists() else final
        manifest = self._saving.join(
            there, order.files,
            step=order.step, world=self._state.world, adaptor=self._state.adaptor,
        )  # fmt: skip
        self._saving.commit(partial, final, manifest)


def cores_for_digests(*, alone: bool) -> int:
    """
    Return the number of processor cores for the digests of this rank. The ranks of a node share the
    cores of the node. A rank uses all cores that it may use if it is `alone` (most other ranks
    compute no digests now), or if it is bound to some of the cores. More threads than cores would
    only take turns, and disturb processes that start at the same time.
    """
    cores = len(os.sched_getaffinity(0))
    shared = not alone and cores == os.cpu_count()
    return max(1, cores // ranks_on_node()) if shared else cores
