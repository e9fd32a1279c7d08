"""
The hands of a worker: how each order of an incident is carried out with the adaptor's hooks, on
the training thread.
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
from tft.hooks import Buffer, CheckResult, ShardPayload
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
from tft.state_hooks import part_digests
from tft.transfer.client import fetch
from tft.transfer.tls import Tls
from tft.worker.gate import Gate
from tft.worker.saving import Saving

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """
    What carrying out an order has brought.
    """

    files: tuple[SavedFile, ...] = ()
    verdict: Verdict = "pass"
    finding: str = ""
    private: dict[int, str] = field(default_factory=dict)
    digests: dict[str, dict[str, str]] = field(default_factory=dict)
    compared: float = 0.0
    """Seconds that the digests took."""
    line: str = ""
    odd: dict[int, str] = field(default_factory=dict)


class State(Protocol):
    """
    What the hands read and write of the session.
    """

    model: object

    @property
    def rank(self) -> int:
        """Global rank."""

    @property
    def world(self) -> int:
        """World size."""

    @property
    def job(self) -> str:
        """The job's name, and the key of its transfer ports."""

    @property
    def tls(self) -> Tls | None:
        """What transfers are encrypted with."""

    @property
    def checkpoints(self) -> CheckpointStore:
        """Where checkpoints are."""

    @property
    def adaptor(self) -> str:
        """The adaptor's name."""


class Hands:
    """
    Carries out orders. `check` runs a check of that name.
    """

    def __init__(
        self,
        state: State,
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
        self._interrupted: tuple[int, bytes] = (-1, b"")
        self._line = ""
        """Where in the tail of a step the loop was left."""
        self._stopped_for: int | None = None
        """The incident for which the loop was left; None until it is known."""
        self._fetching: frozenset[str] = frozenset()
        """The shards that are being fetched: they are not given to others."""
        self._promised: int | None = None
        """The step whose state `tft_rebuild` is to bring; None: nothing is missing."""

    def interrupted(self, step: int, private: bytes, line: str) -> None:
        """
        The loop was left in the middle of `step`; this was the private state then. It is that of
        the step's end for a rank whose all-reduces were cut off while those of others were not. `line` says where,
        in the tail of the step before.
        """
        self._interrupted, self._stopped_for = (step, private), None
        self._line = line

    def carry_out(self, order: RankOrder) -> Work:
        """
        Does what the order says; returns what that has brought. What fails raises.
        """
        match order:
            case Stop():
                # the last reference to the old wrapper outside the adaptor: freed any later, its
                # process group would be torn down beside the new one
                self._state.model = None
                if self._stopped_for is None:
                    self._stopped_for = order.incident
                self._promised = None
                self._hook.tft_clear()
                return Work(line=self._line if self._gate.in_tail else "")
            case Compare():
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
                raise OrderRefused(f"{ORDER_NAMES[type(order)]} is no work for the training thread")
            case _:
                assert_never(order)
        return Work()

    def _compared(self) -> Work:
        """
        Digests of what this rank holds, to be compared with those of the others. Where it cannot read its state it
        has none: then it is not asked for it either.
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

    def digests(self) -> dict[str, dict[str, str]]:
        """
        Digests by shard and part of the state in use, which is whole.
        """
        shards = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        return {each.shard: dict(self._parts(each.shard, self._gate.held())) for each in shards}

    def _parts(self, shard: str, step: int | None) -> Mapping[str, str]:
        if self._hook.tft_compare.get_hookimpls():
            parts: Mapping[str, str] = self._hook.tft_compare(shard=shard)
            return parts
        return part_digests(self._hook.tft_give(shard=shard, step=step))

    def give(self, shard: str, step: int) -> ShardPayload:
        """
        A shard for another rank, if this one holds it at `step` or keeps a copy of that. On a
        transfer thread.
        """
        held, backups = self._gate.held(), self._gate.backups()
        if step != held and step not in backups:
            raise OrderRefused(
                f"rank {self._state.rank} holds step {held}, and copies of steps {list(backups)}, "
                f"but not step {step}, of shard {shard!r}"
            )
        if shard in self._fetching:
            raise OrderRefused(f"rank {self._state.rank} fetches shard {shard!r} itself")
        payload: ShardPayload = self._hook.tft_give(shard=shard, step=step)
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
                f"the adaptor {self._state.adaptor!r} cannot form groups without ranks "
                f"{list(order.without)} of the job"
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
        What only this rank has of what it could not save, for somebody else to write.
        """
        kept = self._page.private()
        return Work(private={step: captured.hex() for step, captured in kept.items()})

    def _rollback(self, order: Rollback) -> None:
        private = self._private(order)
        self._hold(order.step)  # the tail of that step is over, whether it was ended or not
        self._page.forget_after(order.step)
        self._saving.give_up(self._state.checkpoints, order.step)
        self._hook.tft_rollback(private=private)
        if order.skip:
            if not self._hook.tft_skip.get_hookimpls():
                raise OrderRefused(f"the adaptor {self._state.adaptor!r} cannot leave batches out")
            # not captured: a repeated rollback goes back to before, and skips again
            self._hook.tft_skip(batches=order.skip)

    def _checked(self, order: Check) -> Work:
        result = self._check(order.name)
        if result is None:
            raise OrderRefused(f"no plugin knows a check {order.name!r}")
        return Work(verdict=result.verdict, finding=result.finding)

    def _fetch(self, order: Fetch) -> dict[int, str]:
        """
        Returns the sources that were left out, and why.
        """
        shards = self._hook.tft_shards(rank=self._state.rank, world=self._state.world)
        fetched = frozenset(transfer.shard for transfer in order.transfers)
        if self._gate.held() != order.step or {each.shard for each in shards} <= fetched:
            self._gate.tear()
        # others may fetch the rest meanwhile: nobody else may have it
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
        for transfer in order.transfers:
            odd |= fetch(
                transfer,
                order.step,
                job=self._state.job,
                rank=self._state.rank,
                take=partial(self._hook_take, transfer.shard),
                taken=partial(self._hook_taken, transfer.shard, promised),
                abandoned=self._gate.abandoned,
                tls=self._state.tls,
            )
        if promised:  # held is what is whole: a fault before that must not find a copy here
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
        ):  # later ones are out of the way, or will be
            self._hook.tft_newest(directory=directory.parent, newest=directory, step=order.step)
        private = checkpoint.read_private(directory, self._state.rank)
        self._page.capture(order.step, private, True)
        self._hold(order.step)

    def _reload(self, order: Reload) -> None:
        """
        The program finds its checkpoint, and the private state is what it has made of it then.
        """
        reload = self._hook.tft_reload()
        if reload is None:
            raise OrderRefused(f"the adaptor {self._state.adaptor!r} knows of no such checkpoint")
        self._gate.tear()
        step = reload(order.not_after)
        if not isinstance(step, int) or step < 0:
            raise OrderRefused(
                f"a checkpoint was loaded that is said to be of step {step!r}: that is no step"
            )
        self._page.capture(step, self._hook.tft_capture(closing=False), True)
        self._hold(step)

    def _hold(self, step: int) -> None:
        self._gate.hold(step)
        self._page.move(step, False, SystemClock().now())

    def _private(self, order: Rollback | Save) -> bytes:
        """
        This rank's own state at the end of the order's step, captured here or by the process
        before. What it was when the loop was left counts for that incident only: later on others
        may have done the step without this rank.
        """
        step = order.step
        if isinstance(order, Rollback) and self._state.rank in order.derive:
            return self._derived(step)
        captured = self._page.private().get(step)
        if captured is not None:
            return captured
        if step == self._interrupted[0] and order.incident == self._stopped_for:
            if isinstance(order, Rollback):  # this rank goes on from there with the others
                self._page.capture(step, self._interrupted[1], True)
            return self._interrupted[1]
        if step == 0:  # nothing was ever captured: the state the script has set up is the one
            fresh: bytes = self._hook.tft_capture(closing=False)
            self._page.capture(0, fresh, True)
            return fresh
        if isinstance(order, Rollback) and self._state.rank in order.private:
            sent = bytes.fromhex(order.private[self._state.rank])
            self._page.capture(step, sent, True)
            return sent
        raise OrderRefused(
            f"rank {self._state.rank} has no RNG and data position of step {step}: it kept those "
            f"of steps {sorted(self._page.private())}"
        )

    def _derived(self, step: int) -> bytes:
        """
        Made anew: what was captured is lost, or is of a time when the others went on without us.
        """
        if not self._hook.tft_derive.get_hookimpls():
            raise OrderRefused(
                f"the adaptor {self._state.adaptor!r} cannot make an RNG and data position anew"
            )
        derived: bytes = self._hook.tft_derive(step=step)
        self._page.capture(step, derived, True)
        return derived

    def _save(self, order: Save) -> tuple[SavedFile, ...]:
        directory = checkpoint.partial(Path(order.directory))
        directory.mkdir(parents=True, exist_ok=True)
        if not order.copies:  # those it has written may be what there was no room for
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
        own = self._private(order)
        files.append(checkpoint.write_private(directory, self._state.rank, own))
        for rank, private in order.private.items():
            files.append(checkpoint.write_private(directory, rank, bytes.fromhex(private)))
        return tuple(files)

    def _commit(self, order: Commit) -> None:
        final = Path(order.directory)
        partial = checkpoint.partial(final)
        there = partial if partial.exists() else final  # done before, and asked for again
        manifest = self._saving.join(
            there, order.files,
            step=order.step, world=self._state.world, adaptor=self._state.adaptor,
        )  # fmt: skip
        self._saving.commit(partial, final, manifest)
