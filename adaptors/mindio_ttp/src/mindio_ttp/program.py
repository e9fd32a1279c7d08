"""
Carries out the hooks of the adaptor `mindio` by calling the functions that a program for MindIO has
registered.

The program has its own count of steps, because it may have trained before this job began. `base` is
the program's number for step 0 of the job, so a step of the job plus `base` is the program's step.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindio_ttp import device, logs, peer_transfer, replicas
from mindio_ttp.constants import RepairType
from mindio_ttp.exchange import Body, Gathering
from mindio_ttp.handlers import Handlers
from mindio_ttp.peer_transfer import Unit
from mindio_ttp.replicas import Group, agreed_base
from mindio_ttp.torch_groups import GroupNames, Store
from tft.errors import OrderRefused
from tft.spi import ShardCopies, TrainingFault, pack, unpack

log = logs.get_logger()

UNKNOWN = "unknow"
"""The name of the repair if there is none or none is chosen yet, in MindIO's spelling."""
Scaled = Literal["", "in", "out"]
ELASTIC = ("scale_in", "scale_out")
FUNCTIONS = (
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip
"""The functions with which a program continues with fewer ranks, and later with more ranks. It must
register all of them, or tft does not do this."""
SCALE_IN, SCALE_OUT = '{"scale-in-strategy":"DP"}', '{"scale-out-strategy":"DP"}'
"""The last argument of the functions in `FUNCTIONS`, when ranks leave and when they come back. The
values are the JSON texts that MindCluster passes."""
SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""When MindSpeed-LLM finds wrong numbers, the text of its error has this part, with the last step
whose numbers were right."""
TICK = 0.05
"""Seconds between two checks whether the other ranks that save a checkpoint have created their
files."""


@dataclass(slots=True)
class Program:
    """
    The program of one rank.

    `completed` is a function that returns the last complete step, by tft's count. `incarnation` is
    the number of earlier processes of the rank.
    """

    rank: int
    world: int
    handlers: Handlers
    strategies: tuple[str, ...]
    """The strategies that the program supports."""
    group_names: GroupNames = field(default_factory=GroupNames)
    store: Store = field(default_factory=Store)
    """The rendezvous store of a program that uses torch.distributed, unless its launcher serves a
    store."""
    completed: Callable[[], int] = lambda: 0
    incarnation: int = 0
    successor: bool = False
    """True if this process was started while the old process of the rank still trained."""
    contributing: Callable[[], None] = lambda: None
    """The function that tells tft: the other ranks may now complete the step even if this rank is
    lost. It is called at the beginning of each step already, because tft cannot see when the
    program contributes to the last all-reduce. This is safe, because the rank-local state does not
    change during the step."""
    args: Any = None
    """The `args` that every registered function receives. Any: objects of the program."""
    groups: tuple[Group, ...] = ()
    """The groups of ranks that hold copies, from `tft_set_optimizer_replica`."""
    dense: tuple[int, ...] = ()
    """The data-parallel group of this rank. Empty if the program has not set it."""
    base: int | None = None
    """The program's number for step 0 of the job. None until the first step is complete."""
    earlier: int | None = None
    """The `base` of the earlier run that saved the checkpoint from which this run continues."""
    loaded: int | None = None
    """The step of the checkpoint that the program has loaded last. None if the program has not
    reported such a step."""
    uce: bool = False
    """True if this rank has reported that its device memory is lost."""
    torn: bool = False
    """True if this rank left its loop within an update, so that its state may be partly old and
    partly new."""
    stepped_out: bool = False
    """True if this rank left its loop at the end of a step, so that no work was lost."""
    repaired_to: int = 0
    """The program's step to which the last repair has set this rank."""
    repair_type: str = UNKNOWN
    step_is_known: bool = True
    """True if the program knows the step to which the last repair has set this rank."""
    finished: bool = False
    """True if the program has trained all its steps, so that it is not in its loop."""
    clean_first: bool = False
    """True if the program's functions `stop` and `clean` are called before it saves a last
    checkpoint."""
    calls_once: bool = False
    """True if the program's functions for repair, and for continuing with fewer ranks, must not be
    called again after a call has failed, because they keep partial results of the call. This is so
    for programs of MindSpeed."""
    loses_memory: Callable[[RuntimeError], bool] = lambda error: False
    """A function that returns whether an error says that the device has lost memory."""
    _fresh: bool = True
    """True if no incident has been handled yet, so that there is nothing to roll back."""
    _stopped: bool = False
    """True if the program's function `stop` was called since the program was last in its loop."""
    _scaled: Scaled = ""
    """"in" if the present group was formed with fewer ranks, "out" if it was formed with ranks that
    came back. Otherwise empty."""
    _began_at: int = 0
    """The last complete step when the present group was formed."""
    _with_fewer: bool = False
    """True if the program's function for fewer ranks was called, and not all ranks have come
    back."""
    _repaired: bool = False
    """True if a rank has received state in the present group."""
    _light: bool = False
    """True if the program's function `clean` has reported that no content of the memory is lost.
    Then this rank needs no state from other ranks."""
    _formed: int = 0
    """A number that grows each time training resumes. A rank that was not in the job at that time
    keeps a smaller number."""
    _told: Mapping[int, Body] = field(default_factory=dict)
    """The facts that each rank of the present group sent when the group was formed."""
    _known: dict[int, int] = field(default_factory=dict)
    """The incarnation of each rank that took part when training resumed last."""
    _met: dict[int, int] = field(default_factory=dict)
    """The incarnation of each rank in the group that was formed last. Unlike `_known`, it is set
    before training resumes."""
    _gathering: Gathering | None = None
    """The all-gather in which this rank waits for the facts of the other ranks."""
    _group: tuple[str, str, int] = ("", "", 0)
    """The name of the present group, and the host and port of its hub."""
    _stopping: threading.Thread | None = None
    _stop_failed: str = ""
    _needs: dict[str, int] = field(default_factory=dict)
    """The shards that this rank must receive, each with the step of the state."""
    _offers: set[tuple[str, int]] = field(default_factory=set)
    """The shards, each with its step, that this rank has offered to other ranks."""
    _overwritten: bool = False
    """True if received or loaded state has overwritten the state of this rank at least in part, or
    if `clean` has released it."""
    _void: threading.Event = field(default_factory=threading.Event)
    """Set when the controller cancels an order to save. The function that waits for the other ranks
    that save then stops waiting."""
    _saved: tuple[Path, int] | None = None
    """The directory and the attempt number of the last save."""

    # ---------------------------------------------------------------- shards and steps

    def shards(self) -> Sequence[ShardCopies]:
        """
        Return the shard of this rank in each of its groups.

        If the program has set no groups, there is one group of all ranks, and each rank holds the
        whole state.
        """
        if not self.groups:
            everyone = {"rank_list": list(range(self.world)), "replica_cnt": self.world}
            info = [{**everyone, "replica_shift": 0}]
            self.groups = replicas.read(self.rank, self.world, info, whole=True)
        return replicas.shards(self.rank, self.groups)

    def column(self) -> tuple[int, ...]:
        """
        Return the ranks that leave the job together with this rank when the job continues with
        fewer ranks. This rank is among them.
        """
        return self._column() or (self.rank,)

    def _column(self) -> tuple[int, ...] | None:
        partitions = [group.ranks for group in self.groups]
        if self.dense and all(len(ranks) > len(self.dense) for ranks in partitions):
            partitions.append(self.dense)  # the larger groups consist of such groups
        return replicas.column(self.rank, self.world, partitions)

    def settle_strategies(self) -> None:
        """
        Remove the strategies that the program does not support.

        Call this method when all functions are registered and all groups are set.
        """
        missing = [name for name in FUNCTIONS if not self.handlers.has(name)]
        self.shards()
        why = ""
        if missing:
            why = f"these functions are not registered: {', '.join(missing)}"
        elif self._column() is None:
            why = (
                "the groups do not have the same layout on all ranks, so it is not known "
                "which ranks would leave the job together"
            )
        if why and "scale_in" in self.strategies:
            log.warning("ranks_cannot_leave", why=why)
            self.strategies = tuple(s for s in self.strategies if s not in ELASTIC)

    def program_step(self, step: int) -> int:
        """
        Return the program's number for a step of tft. Raises `OrderRefused` while `base` is not
        known.
        """
        if self.base is None:
            raise OrderRefused(
                "this program has not completed a step since it was started, so tft does not know "
                "its step, and cannot repair or save its state yet. If the program continues from "
                "a checkpoint, call tft_report_load_ckpt_step with the step of the checkpoint"
            )
        return step + self.base

    def sound_step(self, said: str) -> int | None:
        """
        Return the last step whose numbers were right, by tft's count, from the text `said` of a
        precision error. Return None if the text names no step, or if `base` is not known.

        Source: `handle_precision_error` of MindSpeed-LLM, which loads the checkpoint of that step.
        """
        named = SOUND.search(said)
        if named is None or self.base is None:
            return None
        return max(0, int(named[1]) - self.base)

    @property
    def fresh(self) -> bool:
        """
        True if this process has handled no incident, and replaces no other process.
        """
        return self._fresh and self.incarnation == 0

    def brought_to(self, step: int) -> None:
        """
        Record that this rank has the state of the end of `step`, by the program's count.
        """
        self.base = step - self.completed()
        self.repaired_to = step

    def local_state(self) -> bytes:
        """
        Return the rank-local state. It consists of `base` only, because the program itself restores
        everything else in its rollback function.
        """
        return pack(self.base)

    def derive(self) -> bytes:
        """
        Return a rank-local state for a rank whose captured state was lost with its node. It has no
        `base`, because this rank learns `base` from another rank.
        """
        return pack(None)

    def load(self) -> None:
        """
        Carry out the order to load a checkpoint at the start of the job. Do nothing, because the
        program itself has loaded its checkpoint.

        Raises `OrderRefused` in a process that has handled an incident or replaces another one.
        """
        if not self.fresh:
            raise OrderRefused(
                "a program for MindIO loads its checkpoints itself when it starts: it cannot load "
                "one while it runs"
            )

    # ---------------------------------------------------------------- out of the loop

    def interrupt(self) -> None:
        """
        Interrupt the training thread, even if it waits for other ranks or the device. tft calls
        this method repeatedly, on a thread of its own, until the training thread has stopped.
        """
        self._void.set()
        gathering = self._gathering
        if gathering is not None:
            gathering.abort()
        if self._stopping is None and not self.finished:
            self.repair_type = UNKNOWN  # the strategy is chosen only after all ranks have stopped
            self._stopping = threading.Thread(target=self._stop, name="mindio-stop", daemon=True)
            self._stopping.start()

    def left(self) -> None:
        """
        Complete the stop of this rank, whose program has left its loop. Call the program's `stop`
        function, or wait until the call that `interrupt` has started is over.

        If the program left its loop at the end of a step, the function is not called here, but
        later if the repair needs it. Raises `OrderRefused` if the function has failed.
        """
        self.finished = False
        if self._stopping is None:
            self.repair_type = UNKNOWN
            if not self.stepped_out:
                self._stop()
        else:
            self._stopping.join()
        self._stopping = None
        self._needs.clear()
        self._offers.clear()
        self._light = False
        failed, self._stop_failed = self._stop_failed, ""
        if failed:
            raise OrderRefused(f"the program's stop function has failed: {failed}")

    def _stop(self) -> None:
        self._stopped = True
        if not self.handlers.has("stop"):
            return
        try:
            self.handlers.call("stop", self.args)
        except Exception as error:
            log.exception("stop_failed")
            self._stop_failed = f"{type(error).__name__}: {error}"

    # ---------------------------------------------------------------- repair

    def regroup(self, name: str, host: str, port: int, place: int, world: int) -> None:
        """
        Exchange facts with the other ranks, clean the device if necessary, and let the program form
        its groups.

        The program forms its groups again only if some ranks are new or missing. Raises
        `OrderRefused` if the ranks do not agree about their groups or steps.
        """
        self._group = (name, host, port)
        repair = name.rpartition("/")[2]
        self.group_names.begin(repair)
        self.store.begin(repair, host, port)
        facts = {
            "incarnation": self.incarnation,
            "groups": [[g.type, list(g.ranks), g.copies] for g in self.groups],
            "known": sorted(self._known.items()),
            "base": self.base,
            "completed": self.completed(),
            "successor": self.successor,
            "stepped_out": self.stepped_out,
            "formed": self._formed,
            "column": list(self.column()) if "scale_in" in self.strategies else [],
        }
        joined = self._gather(name, world, facts)
        self._agree(joined)
        if self.rank == 0 and not self._formed:
            replicas.announce({rank: told["groups"] for rank, told in joined.items()})
        self._told = joined
        stayed = _stayed(joined)
        replaced = self._replaced(stayed, joined)
        gone, back = _gone(stayed, joined), _back(stayed, joined)
        self._scaled = ""
        if len(joined) < self.world and (gone or back or replaced):
            self._scaled = "in"
        elif back:
            self._scaled = "out"
        self._began_at = self.completed()
        first = not self._known and self.incarnation == 0
        self._met = {rank: int(told["incarnation"]) for rank, told in joined.items()}
        self._light = False
        self._fresh = first
        if not first or self._stopped:
            fresh = not self._known
            switched = not self._scaled and _is_switch(joined, replaced)
            # also clean a new process if `stop` was called in it, in an earlier attempt
            cleans = self._stopped or not (fresh or self.rank in replaced or switched)
            if cleans:
                self._stop_at_last()
            self.repair_type = "recover" if replaced else "retry"
            if self._scaled:
                self.repair_type = UNKNOWN
            if cleans:
                self._clean()
        if not first:
            self._build(sorted({*replaced, *back}), sorted(joined))

    def _gather(self, name: str, world: int, facts: Body) -> dict[int, Body]:
        """
        Send `facts` to the other ranks and wait for the facts of `world` ranks. Return them by
        rank. `interrupt` ends the wait.
        """
        _, host, port = self._group
        self._gathering = gathering = Gathering(host, port)
        try:
            return gathering.join(name, self.rank, world, facts)
        finally:
            self._gathering = None

    def _build(self, new: Sequence[int], members: Sequence[int]) -> None:
        """
        Let the program form its groups if ranks have left, have come back or have a new process.
        `new` are the ranks that came back or have a new process, and `members` are all ranks.
        """
        if self._scaled == "in":
            if self.calls_once and self._with_fewer:
                raise OrderRefused(
                    "the program already continues with fewer ranks, and its function for that can "
                    "be called only once, because MindSpeed-LLM's function counts from the groups "
                    "that it has formed"
                )
            self._with_fewer = True
            left = [rank for rank in self.groups[0].ranks if rank in members]
            self.handlers.call("zit_downgrade_rebuild", left, list(members), self.args, SCALE_IN)
        elif self._scaled == "out":
            self.handlers.call("zit_upgrade_rebuild", list(new), self.args, SCALE_OUT)
            self._with_fewer = False
        elif new and self.handlers.has("rebuild_group"):
            self.handlers.call("rebuild_group", list(new), self.args)

    def _agree(self, joined: Mapping[int, Body]) -> None:
        told = {
            rank: tuple(Group(type=t, ranks=tuple(r), copies=c) for t, r, c in each["groups"])
            for rank, each in joined.items()
        }
        why = replicas.disagreement(told)
        if why:
            raise OrderRefused(f"tft_set_optimizer_replica: {why}")
        for rank, each in joined.items():
            for peer in each["column"]:
                if peer in joined and joined[peer]["column"] != each["column"]:
                    raise OrderRefused(
                        f"rank {rank} would leave together with ranks {each['column']}, but rank "
                        f"{peer} would leave together with {joined[peer]['column']}: with "
                        "enable_zit all groups must have the same layout"
                    )
        why = agreed_base({rank: each["base"] for rank, each in joined.items()})
        if why:
            raise OrderRefused(why)

    def _replaced(self, stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> list[int]:
        """
        Return the ranks with a new process: one that a staying rank has not trained with yet.
        `stayed` and `joined` have the facts of the staying ranks and of all ranks.
        """
        replaced = set()
        for told in stayed.values():
            for rank, incarnation in told["known"]:
                if rank in joined and joined[rank]["incarnation"] != incarnation:
                    replaced.add(int(rank))
        return sorted(replaced)

    def _clean(self) -> None:
        if not self.handlers.has("clean"):
            return
        result = self.handlers.call("clean", self.uce, self.args)
        if result not in (0, 2):
            raise OrderRefused(
                f"the program's clean function returned {result!r}: it could not clean"
            )
        device.release_memory()  # make room for received state
        self._stopped = False
        if self.uce and result == 0:
            # `clean` has released the memory with the state, so this rank needs state from others
            self._overwritten = True
        self._light = result == 2 and self.uce and not (self.torn or self._overwritten)

    def rebuild(self) -> None:
        """
        Let the program send the state that ranks need. On each rank that sends or receives state,
        the program's repair function is called.
        """
        said = {
            "needs": [[shard, step] for shard, step in sorted(self._needs.items())],
            "offers": [[shard, step] for shard, step in sorted(self._offers)],
            "base": self.base,
        }
        told = self._gather(f"{self._group[0]}/repair", len(self._told), said)
        units = peer_transfer.units(told, self.world)
        self._repaired = bool(units)
        received = [unit for unit in units if unit.destination == self.rank]
        sent = [unit for unit in units if unit.source == self.rank]
        if received:
            # take over `base` now: `program_step` needs it, and raises an error if it is unknown
            # before any state is overwritten
            self.base = told[received[0].source]["base"]
            self.program_step(received[0].step)
            self._overwritten = True
            lost = self.uce and self.repair_type == "retry"
            kind = RepairType.RT_UCE_HIGHLEVEL if lost else RepairType.RT_RECV_REPAIR
            self._repair(kind, received, units)
            # the state is complete now, so a later attempt need not repair this rank
            self.uce = self.torn = False
        if sent:
            self._repair(RepairType.RT_SEND, sent, units)

    def rollback(self, local_state: bytes) -> None:
        """
        Set this rank to the step from which all ranks continue, and call the program's rollback
        function. At the start of a job there is nothing to roll back, and it is not called.
        """
        self.earlier = unpack(local_state) if self._fresh and self.completed() else None
        if not self._fresh:
            self.repaired_to = self.program_step(self.completed())
        elif self.loaded is not None:
            self.base = self.loaded - self.completed()
        moved = self._overwritten or self.completed() != self._began_at or self.torn
        self.uce = self.torn = self._stopped = self._overwritten = self.stepped_out = False
        self._known = self._met
        self._formed = 1 + max((told["formed"] for told in self._told.values()), default=0)
        if self._fresh:
            return
        if self._scaled == "out":
            self.step_is_known = True
            self.handlers.call("zit_upgrade_rollback", self.repaired_to, self.args, SCALE_OUT)
            return
        if self._scaled == "in" and not (moved or self._repaired):
            # no state was moved, so the program continues from the step that it completed last
            self.step_is_known = True
            return
        self.step_is_known = self.handlers.has("rollback")
        if self.step_is_known:
            self.handlers.call("rollback", self.repaired_to, self.args)

    # ---------------------------------------------------------------- state from rank to rank

    def offer(self, shard: str, step: int) -> bytes:
        """
        Record that this rank can send its copy of the shard, of `step`, to another rank. Return the
        description of the copy. Called on a transfer thread.
        """
        self._offers.add((shard, step))
        return pack({"step": step})

    def need(self, shard: str, meta: bytes) -> bool:
        """
        Record that this rank needs a shard from another rank. Return True, because the program
        receives the shard in `rebuild`.

        Return False if this rank still has the shard: its memory was cleaned without loss. Raises
        `OrderRefused` if the program has registered no repair function.
        """
        step = int(unpack(meta)["step"])
        if self._light and self.completed() == step:
            self.uce = False
            return False
        if self._scaled != "out" and not self.handlers.has("repair"):
            raise OrderRefused(
                f"rank {self.rank} needs {shard} from another rank, but the program has registered "
                "no repair function: call tft_register_repair_handler"
            )
        self._needs[shard] = step
        return True

    # ---------------------------------------------------------------- a checkpoint of the program itself

    @property
    def reloads(self) -> bool:
        """
        True if the program's repair function can load the newest checkpoint that the program itself
        has saved.

        The repair functions of programs for MindSpore cannot.
        """
        return self.handlers.has("repair") and not self.handlers.mindspore

    def reload(self, not_after: int | None) -> int:
        """
        Let the program's repair function load the program's newest checkpoint. All ranks do this at
        the same time. Return the step of the checkpoint, by tft's count.

        As its argument `step`, the function gets the last step whose numbers may be right. This is
        `not_after`, or the last complete step of any rank if that step is earlier.
        """
        if self.base is None:  # in a replacement, the other ranks know the base
            known = [told["base"] for told in self._told.values() if told["base"] is not None]
            self.base = known[0] if known else None
        ahead = max(int(told["completed"]) for told in self._told.values())
        at = self.program_step(ahead if not_after is None else min(ahead, not_after))
        rebuild = self.uce and not self._light
        kind = RepairType.RT_LOAD_REBUILD if rebuild else RepairType.RT_LOAD_CKPT
        types = [group.type for group in self.groups]
        own = [self.rank] * len(types)
        info = {
            "type": types,
            "repair_type": kind.value,
            "src": own,
            "dst": own,
            "rank_list": sorted(self._told),
        }
        self.loaded, self._overwritten = None, True
        self.handlers.call("repair", at, rebuild, own, info, self.args)
        found = self._found()
        self.uce = self.torn = False
        return found

    def _found(self) -> int:
        """
        Return the step of the checkpoint that the program has loaded, by tft's count. Raises
        `OrderRefused` if the program has not reported it, or if it is from before this job.
        """
        if self.loaded is None:
            raise OrderRefused(
                "the program's repair function has loaded a checkpoint, and its step is not "
                "known: call tft_report_load_ckpt_step"
            )
        first = self.program_step(0)
        if self.loaded < first:
            raise OrderRefused(
                f"the program has loaded a checkpoint of step {self.loaded}, but it began this job "
                f"at step {first}, and tft cannot go back beyond the beginning of the job"
            )
        return self.loaded - first

    def _repair(self, kind: RepairType, own: Sequence[Unit], units: Sequence[Unit]) -> None:
        """
        Call the program's repair function. `own` are the transfers of this rank, and `units` are
        all transfers of the repair.

        Raises `TrainingFault` after an error that makes another call impossible, so that this
        process is replaced.
        """
        destinations = [unit.destination for unit in own]
        info = {
            "type": [unit.type for unit in own],
            "repair_type": kind.value,
            "src": [unit.source for unit in own],
            "dst": destinations,
            "rank_list": peer_transfer.participants(units),
        }
        rebuild = kind is RepairType.RT_UCE_HIGHLEVEL
        told = (self.program_step(own[0].step), rebuild, list(destinations), info, self.args)
        try:
            if self._scaled == "out":
                self.handlers.call("zit_upgrade_repair", *told, SCALE_OUT)
            else:
                self.handlers.call("repair", *told)
        except RuntimeError as error:
            receives = kind is not RepairType.RT_SEND
            if self.loses_memory(error) or (receives and self.calls_once):
                # This error lets tft replace the process: a second call cannot succeed in it.
                raise TrainingFault(str(error), context_lost=True) from error
            raise

    # ---------------------------------------------------------------- the last checkpoint

    def save(self, directory: Path, shards: Sequence[str], step: int, attempt: int) -> list[str]:
        """
        Let the program save the parts of the state that this rank was chosen to save. If they are
        saved already in this attempt, do nothing.

        All chosen ranks save at the same time. Return the name of the file under `directory` that
        lists the saved parts.
        """
        if not attempt:
            raise OrderRefused(
                "tft asked for a second copy of a part of the checkpoint, but a program for MindIO "
                "saves each part only once"
            )
        name = f"mindio-{self.rank}.json"
        if self._saved == (directory, attempt):
            return [name]
        if not self.handlers.has("save_ckpt"):
            raise OrderRefused(
                "the program has registered no save function: call tft_register_save_ckpt_handler"
            )
        self._void.clear()
        self.repair_type = "dump"
        if self.clean_first:
            self._stop_and_clean()
        for each in shards:
            (directory / f"{each}.{attempt}.saver-{self.rank}").touch()
        chosen = [group for group in self.groups if group.shard(group.part_of(self.rank)) in shards]
        info = [{"type": g.type, "ranks": self._savers(directory, g, attempt)} for g in chosen]
        at = self.program_step(step)
        self.group_names.begin(f"{directory.name}.{attempt}")
        with device.own_stream():
            self.handlers.call("save_ckpt", at, info, self.args)
        (directory / name).write_text(json.dumps({"step": at, "saved": info}))
        self._saved = (directory, attempt)
        return [name]

    def _stop_and_clean(self) -> None:
        self._stop_at_last()
        self._clean()

    def _stop_at_last(self) -> None:
        """
        Call the program's `stop` function now, before the device is cleaned, if it was not called
        yet. Raises `OrderRefused` if the function has failed.
        """
        if not self._stopped:
            self._stop()
        failed, self._stop_failed = self._stop_failed, ""
        if failed:
            raise OrderRefused(f"the program's stop function has failed: {failed}")

    def _savers(self, directory: Path, group: Group, attempt: int) -> list[int]:
        """
        Return, for each part of the state of a group, the rank that saves the part.

        Each rank that saves has created a file whose name has the part and the rank. This function
        waits until there is a file for each part. Raises `OrderRefused` if the save is cancelled.
        """
        names = [f"{group.shard(part)}.{attempt}" for part in range(group.parts)]
        while not self._void.wait(TICK):
            found = [list(directory.glob(f"{name}.saver-*")) for name in names]
            if all(found):
                return [int(path.name.rpartition("-")[2]) for [path] in found]
        raise OrderRefused("the save was cancelled, because the controller no longer needs it")

    def rename(self, directory: Path, step: int) -> None:
        """
        Let the program give the checkpoint its final name, when all parts are saved. Do nothing if
        this was done before.
        """
        mark = directory / "renamed"
        if self.handlers.has("rename") and not mark.exists():
            told = (self.program_step(step),) if self.handlers.mindspore else (
                self.program_step(step), self.args,
            )  # fmt: skip
            self.handlers.call("rename", *told)
        mark.touch()


def _is_switch(joined: Mapping[int, Body], replaced: Sequence[int]) -> bool:
    """
    Return whether this repair only replaces processes by processes that were started beforehand
    (successors), and all other ranks have left their loops at the end of a step.
    """
    kept = [told for rank, told in joined.items() if rank not in replaced]
    return (
        bool(replaced)
        and all(joined[rank]["successor"] for rank in replaced)
        and all(told["stepped_out"] for told in kept)
    )


def _stayed(joined: Mapping[int, Body]) -> Mapping[int, Body]:
    """
    Return the facts of the staying ranks: the ranks that took part when training resumed last, and
    have trained in their present process. `joined` has the facts of all ranks.
    """
    latest = max(told["formed"] for told in joined.values())
    known = {
        int(r) for told in joined.values() if told["formed"] == latest for r, _ in told["known"]
    }
    return {rank: told for rank, told in joined.items() if rank in known and told["known"]}


def _gone(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    Return the ranks that have left: they took part when training resumed last, and are missing now.
    """
    return {int(rank) for told in stayed.values() for rank, _ in told["known"]} - joined.keys()


def _back(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    Return the ranks that have come back: they take part now, but did not when training resumed
    last.
    """
    return {
        rank
        for told in stayed.values()
        for rank in joined.keys() - {int(each) for each, _ in told["known"]}
    }
