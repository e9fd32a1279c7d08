"""
The order executor of a worker.

It carries out each order of an incident with the adaptor's hooks, on the training thread.
"""

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
from tft.errors import OrderRefused
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
from tft.spi.state import part_digests
from tft.spi.types import Buffer, CheckResult, ShardPayload
from tft.transfer.client import Receiver, fetch
from tft.transfer.tls import Tls
from tft.worker.saving import Saving
from tft.worker.slices import Slices
from tft.worker.step_gate import Gate

log = structlog.get_logger()


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
    """The time in seconds that the computation of the digests took."""
    line: str = ""
    odd: dict[int, str] = field(default_factory=dict)


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
        """The job's name. A rank must send it to fetch a shard from another rank of the job."""

    @property
    def tls(self) -> Tls | None:
        """The TLS settings of shard transfers. None: transfers are not encrypted."""

    @property
    def checkpoints(self) -> CheckpointStore:
        """The store in which this run keeps its checkpoints."""

    @property
    def adaptor(self) -> str:
        """The adaptor's name."""


class Hands:
    """
    Carries out the orders of one rank. `check(name)` runs a check of a plugin, and returns None if
    no plugin has a check of this name.
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
        """Digests slices of the shards of this rank, to be compared while it trains."""
        self._interrupted: tuple[int, bytes] = (-1, b"")
        self._line = ""
        """The line (FILE:LINE) in the tail of a step at which the loop was left."""
        self._stopped_for: int | None = None
        """The incident for which the loop was left. None if the loop was not left, or if the
        incident is not known yet."""
        self._fetching: frozenset[str] = frozenset()
        """The shards that this rank is fetching now. Until they are complete, it refuses to give
        them to other ranks."""
        self._at_end: tuple[int | None, Work] | None = None
        """The step after which the loop ended, and the digests of the state at that time. None
        while the loop has not ended, and after an incident has made the ranks leave the loop."""
        self._promised: int | None = None
        """The step of a fetched state that will be complete after `tft_rebuild`. None if the
        present state does not wait for `tft_rebuild`."""

    def interrupted(self, step: int, local_state: bytes, line: str) -> None:
        """
        Record that the loop was left in the middle of `step`, with this rank-local state.

        If only this rank was interrupted, the other ranks may complete the all-reduces of `step`.
        Then `local_state` is also the rank-local state of the end of `step`. `line` is the line
        (FILE:LINE) at which the loop was left; it is empty unless the loop was in the tail of the
        step before.
        """
        self._interrupted, self._stopped_for = (step, local_state), None
        self._line = line

    def carry_out(self, order: RankOrder) -> Work:
        """
        Carry out an order and return the result. Raises an exception if the order fails.
        """
        match order:
            case Stop():
                # drop the last reference to the old wrapper outside the adaptor: if the wrapper
                # were freed later, its process group would be destroyed while the new one is in use
                self._state.model = None
                if self._stopped_for is None:
                    self._stopped_for = order.incident
                self._promised = self._at_end = None
                self._hook.tft_clear()
                return Work(line=self._line if self._gate.in_tail else "")
            case Compare():
                # return the digests from the end of the loop: code after the loop may have changed
                # the state on some ranks
                if self._at_end is not None and self._at_end[0] == self._gate.held():
                    return self._at_end[1]
                return self._compared()
            case Load():
                self._load(order)
            case Fetch():
                odd = self._fetch(order)
                return replace(self._compared(), odd=odd)
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
                self._rollback(order)
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

    def _compared(self) -> Work:
        """
        Return digests of the state that this rank holds, for the comparison with other ranks.

        If this rank cannot read its state, return no digests. The controller then does not use this
        rank as a source.
        """
        step, began = self._gate.held(), SystemClock().now()
        digests: dict[str, dict[str, str]] = {}
        try:
            digests = {} if step is None else self.digests()
        except Exception:
            log.warning("state_not_compared", step=step, exc_info=True)
            digests = {}
        seconds = SystemClock().now() - began if digests else 0.0
        return Work(digests=digests, compared=seconds)

    def ends(self) -> None:
        """
        Digest the state at the end of the loop, for the comparison before the job completes. The
        digests are made now, because code after the loop may change the state.
        """
        self._at_end = self._gate.held(), self._compared()

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Return digests of the present state, by shard and part. The state must be complete.
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
                f"rank {self._state.rank} cannot give shard {shard!r} of step {step}: it has step "
                f"{held}, and copies of steps {list(backups)}"
            )
        if shard in self._fetching:
            raise OrderRefused(
                f"rank {self._state.rank} cannot give shard {shard!r}: it is fetching that shard "
                "itself"
            )
        payload: ShardPayload = self._hook.tft_give(shard=shard, step=step, kept=step != held)
        return payload

    def _restore(self, order: Restore) -> None:
        if order.step not in self._gate.backups():
            raise OrderRefused(f"rank {self._state.rank} keeps no copy of step {order.step}")
        self._gate.tear()
        self._hook.tft_restore(step=order.step)
        self._hold(order.step)

    def _regroup(self, order: Regroup) -> None:
        if order.without and "scale_in" not in self._hook.tft_strategies():
            raise OrderRefused(
                f"the adaptor {self._state.adaptor!r} cannot form process groups without ranks "
                f"{list(order.without)}"
            )
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
        Return the captures of this rank's rank-local state, so that another rank can save them.

        Called when this rank could not save its part of a last checkpoint. No other rank has the
        rank-local state of this rank.
        """
        kept = self._page.local_states()
        return Work(local_state={step: captured.hex() for step, captured in kept.items()})

    def _rollback(self, order: Rollback) -> None:
        local_state = self._local_state(order)
        # all ranks return to the end of this step, so its tail counts as complete
        self._hold(order.step)
        self._page.forget_after(order.step, (order.incident, order.round))
        self._saving.give_up(self._state.checkpoints, order.step)
        self._hook.tft_rollback(local_state=local_state, step=order.step)
        if order.skip:
            if not self._hook.tft_skip.get_hookimpls():
                raise OrderRefused(f"the adaptor {self._state.adaptor!r} cannot skip batches")
            # do not capture the state after the skip: a repeated rollback must return to the state
            # before it, and then skip again
            self._hook.tft_skip(batches=order.skip)

    def _checked(self, order: Check) -> Work:
        result = self._check(order.name)
        if result is None:
            raise OrderRefused(f"no installed plugin has a check named {order.name!r}")
        return Work(verdict=result.verdict, finding=result.finding)

    def _fetch(self, order: Fetch) -> dict[int, str]:
        """
        Fetch shards from other ranks. Return the sources that were left out, each with the reason.
        """
        shards = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        fetched = frozenset(transfer.shard for transfer in order.transfers)
        if self._gate.held() != order.step or {each.shard for each in shards} <= fetched:
            self._gate.tear()
        # otherwise the shards that are not fetched stay complete. They are not marked as torn,
        # because other ranks may need to fetch them from here
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
        # a promised shard is complete only after `tft_rebuild`: if a fault occurs before that,
        # other ranks must fetch nothing from this rank
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
        ):  # loaded from this run's store: it is the newest checkpoint now, later ones are invalid
            self._hook.tft_newest(directory=directory.parent, newest=directory, step=order.step)
        local_state = checkpoint.read_local_state(directory, self._state.rank)
        self._page.capture(order.step, local_state, True)
        self._hold(order.step)

    def _reload(self, order: Reload) -> None:
        """
        Let the program load one of its own checkpoints, and capture the rank-local state.

        Raises `OrderRefused` if the adaptor finds no such checkpoint, or if the loaded checkpoint
        has no valid step.
        """
        reload = self._hook.tft_reload()
        if reload is None:
            raise OrderRefused(
                f"the adaptor {self._state.adaptor!r} has no checkpoints of the script's own"
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

        This process or an earlier process of the rank captured the state. The capture from the
        moment when the loop was left is valid only in the same incident, because other ranks may
        complete that step later without this rank. Raises `OrderRefused` if there is no state of
        the step.
        """
        step = order.step
        if isinstance(order, Rollback) and self._state.rank in order.derive:
            return self._derived(step)
        captured = self._page.local_states().get(step)
        if captured is not None:
            return captured
        if step == self._interrupted[0] and order.incident == self._stopped_for:
            # after a rollback this rank trains on from this state, so put it on the page (the
            # shared memory that outlives the process)
            if isinstance(order, Rollback):
                self._page.capture(step, self._interrupted[1], True)
            return self._interrupted[1]
        # nothing is captured before step 1: the script itself has just set up the state
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
        Make the rank-local state of `step` from the number of the step, and return it.

        Used when the captured state is lost, or when the other ranks have continued without this
        rank. Raises `OrderRefused` if the adaptor cannot make it.
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
        if not order.copies:  # remove copies of an earlier attempt: they may have filled the disk
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
        # if the order is repeated, the checkpoint may have its final name already
        there = partial if partial.exists() else final
        manifest = self._saving.join(
            there, order.files,
            step=order.step, world=self._state.world, adaptor=self._state.adaptor,
        )  # fmt: skip
        self._saving.commit(partial, final, manifest)
