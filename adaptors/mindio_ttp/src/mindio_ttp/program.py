"""
Carries out the hooks of the adaptor `mindio`. To do so, it calls the functions that a training
program for the library MindIO has registered.

The program has its own count of steps, because it may have trained before this job began. `base` is
the program's number for step 0 of the job. So the number of a step by tft's count plus `base` is
the program's number of the same step.
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
"""The name that the library MindIO gives to the repair while there is no repair, or while no repair
is chosen yet."""
Scaled = Literal["", "in", "out"]
ELASTIC = ("scale_in", "scale_out")
FUNCTIONS = (
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip
"""The names of the functions by which a program continues with fewer ranks, and later with all
ranks again. tft lets the job continue with fewer ranks only if the program has registered all of
these functions."""
SCALE_IN, SCALE_OUT = '{"scale-in-strategy":"DP"}', '{"scale-out-strategy":"DP"}'
"""The last argument of the functions in `FUNCTIONS`: `SCALE_IN` when ranks leave the job, and
`SCALE_OUT` when ranks come back. These are the JSON texts that MindCluster passes."""
SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""The pattern that finds, in the text of an error, the last step whose training state was right.
The framework MindSpeed-LLM raises such an error when it finds that training computes wrong
values."""
TICK = 0.05
"""The seconds between two checks whether the other ranks that save a checkpoint have created the
files with which they announce this."""


@dataclass(slots=True)
class Program:
    """
    The training program of one rank, as tft sees it: the functions that the program has registered,
    and the facts that are known about its state.

    `completed` is a function that returns the last complete step, by tft's count. `incarnation` is
    the number of earlier processes of the rank.
    """

    rank: int
    world: int
    handlers: Handlers
    strategies: tuple[str, ...]
    """The recovery strategies of tft that the program supports."""
    group_names: GroupNames = field(default_factory=GroupNames)
    store: Store = field(default_factory=Store)
    """The rendezvous store with which torch.distributed forms process groups. tft serves the store,
    unless the launcher of the program serves one."""
    completed: Callable[[], int] = lambda: 0
    incarnation: int = 0
    successor: bool = False
    """True if this process was started while the earlier process of the rank still trained."""
    contributing: Callable[[], None] = lambda: None
    """The function that tells tft that from now on the other ranks may complete the step even if
    this rank is lost. The function is called at the beginning of each step already, because tft
    cannot see when the program contributes to the last all-reduce. The early call is safe, because
    the rank-local state of such a program does not change during the step."""
    args: Any = None
    """The argument `args` that every registered function receives. Any: objects of the program."""
    groups: tuple[Group, ...] = ()
    """The groups of ranks that hold copies of the same state, as the program has set them with
    `tft_set_optimizer_replica`."""
    dense: tuple[int, ...] = ()
    """The ranks of the data-parallel group of this rank. Empty if the program has not set this
    group."""
    base: int | None = None
    """The program's number for step 0 of the job. None while this number is not known, for example
    before the first step is complete."""
    earlier: int | None = None
    """The program's number for step 0 of the job in the earlier run that saved the checkpoint from
    which this run continues. None if there was no such run."""
    loaded: int | None = None
    """The step of the checkpoint that the program has loaded last. None if the program has not
    reported such a step."""
    uce: bool = False
    """True if this rank has reported that content of its device memory is lost."""
    torn: bool = False
    """True if this rank left its training loop within an update, so that its training state may be
    partly old and partly new."""
    stepped_out: bool = False
    """True if this rank left its training loop at the end of a step, so that no work was lost."""
    repaired_to: int = 0
    """The step to which the last repair has set this rank, by the program's own count."""
    repair_type: str = UNKNOWN
    """The name of the repair that is being carried out: `retry`, `recover`, `dump` or `unknow`."""
    step_is_known: bool = True
    """True if the program knows the step to which the last repair has set this rank."""
    finished: bool = False
    """True if the program has trained all its steps, so that it is no longer in its training
    loop."""
    clean_first: bool = False
    """True if tft must call the program's functions `stop` and `clean` before the program saves a
    last checkpoint."""
    calls_once: bool = False
    """True if the program uses the framework MindSpeed. Its functions that receive state must then
    not be called again after a failed call, because they keep partial results of that call. Its
    function that continues with fewer ranks must not be called again before all ranks are back."""
    loses_memory: Callable[[RuntimeError], bool] = lambda error: False
    """A function that returns whether the text of an error says that the device has lost content of
    its memory."""
    _fresh: bool = True
    """True if no incident has been handled yet, so that there is nothing to roll back."""
    _stopped: bool = False
    """True if the program's function `stop` was called since training last resumed, and the device
    was not cleaned after that."""
    _scaled: Scaled = ""
    """How the ranks that train changed when they last formed a group. The value is "in" if the new
    group has fewer ranks than the job, and other ranks or processes than the group before. The
    value is "out" if the new group has all ranks, and some of them came back. Otherwise it is
    empty."""
    _began_at: int = 0
    """The last complete step of this rank at the time when the present group of ranks was formed.
    If the last complete step is another one at the rollback, the repair has changed the state of
    this rank."""
    _with_fewer: bool = False
    """True if the program's function `zit_downgrade_rebuild`, which continues with fewer ranks, was
    called, and not all ranks have come back since."""
    _repaired: bool = False
    """True if any rank has received state from another rank since this rank was last rolled back.
    """
    _upgrading: tuple[int, ...] = ()
    """The ranks that are coming back to the job. Empty again when the program's function
    `zit_upgrade_rollback` has succeeded. If that function fails, the next attempt brings the same
    ranks back."""
    _light: bool = False
    """True if this rank needs no state from other ranks after a memory error. The value is True if
    the program's function `clean` has reported that no content of the device memory is lost."""
    _formed: int = 0
    """A number that grows each time training resumes. A rank that did not take part when training
    resumed keeps a smaller number than the other ranks. So the ranks with the highest number know
    which ranks trained last."""
    _told: Mapping[int, Body] = field(default_factory=dict)
    """Maps each rank of the present group of ranks to the facts that the rank sent when the group
    was formed."""
    _known: dict[int, int] = field(default_factory=dict)
    """Maps each rank that took part when training last resumed to its incarnation at that time."""
    _met: dict[int, int] = field(default_factory=dict)
    """Maps each rank of the group that was formed last to its incarnation. Unlike `_known`, this
    field is set before training resumes."""
    _gathering: Gathering | None = None
    """The all-gather in which this rank is waiting for the facts of the other ranks. None if this
    rank is not waiting."""
    _group: tuple[str, str, int] = ("", "", 0)
    """The name of the present group of ranks, and the host and port of the hub (the server of
    all-gathers) that the group uses."""
    _stopping: threading.Thread | None = None
    """The thread that calls the program's function `stop`. None if there is no such thread."""
    _stop_failed: str = ""
    """The error of the program's function `stop`, as a text. Empty if there was no error."""
    _needs: dict[str, int] = field(default_factory=dict)
    """Maps each shard that this rank must receive to the step to whose end its content belongs."""
    _offers: set[tuple[str, int]] = field(default_factory=set)
    """The shards that this rank has offered to other ranks, each with the step to whose end its
    content belongs."""
    _overwritten: bool = False
    """True if the training state of this rank is overwritten at least in part by received or loaded
    state. Also True if the program's function `clean` has released the state."""
    _void: threading.Event = field(default_factory=threading.Event)
    """Set when the controller cancels an order to save a checkpoint. `_savers`, which waits for the
    other ranks that save, then stops waiting."""
    _saved: tuple[Path, int] | None = None
    """The directory and the attempt number of the last checkpoint that this rank has saved."""

    # ---------------------------------------------------------------- shards and steps

    def shards(self) -> Sequence[ShardCopies]:
        """
        Return the shards that this rank holds: one shard for each group of ranks that holds copies
        of the same state.

        If the program has set no groups, assume one group of all ranks, in which each rank holds
        the whole state.
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
            # all groups in `partitions` are larger than a data-parallel group, so each of these
            # groups consists of data-parallel groups
            partitions.append(self.dense)
        return replicas.column(self.rank, self.world, partitions)

    def settle_strategies(self) -> None:
        """
        Remove from `strategies` the recovery strategies that the program does not support.

        Call this method when the program has registered all its functions and has set the groups of
        ranks that hold copies of the same state.
        """
        missing = [name for name in FUNCTIONS if not self.handlers.has(name)]
        self.shards()
        why = ""
        if missing:
            why = f"the training script has not registered the functions {', '.join(missing)}"
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
        Return the program's own number for `step`, a step by tft's count. Raises `OrderRefused`
        while `base`, the program's number for step 0 of the job, is not known.
        """
        if self.base is None:
            raise OrderRefused(
                "the training script has not completed a step since it was started, so tft does "
                "not know at which step the script is, and cannot repair or save the state yet. If "
                "the script continues from a checkpoint, call tft_report_load_ckpt_step with the "
                "step of the checkpoint"
            )
        return step + self.base

    def sound_step(self, said: str) -> int | None:
        """
        Return the last step whose training state was right, by tft's count. `said` is the text of
        an error about wrong values, which names this step. Return None if the text names no step,
        or if the program's number for step 0 of the job is not known.

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
        Record that this rank has the training state of the end of `step`, by the program's own
        count.
        """
        self.base = step - self.completed()
        self.repaired_to = step

    def local_state(self) -> bytes:
        """
        Return the rank-local state. It consists only of `base`, the program's number for step 0 of
        the job. The program itself restores everything else in its rollback function.
        """
        return pack(self.base)

    def derive(self) -> bytes:
        """
        Return a rank-local state for a rank whose captured rank-local state was lost with a node.

        The returned state does not contain `base` (the program's number for step 0 of the job),
        because this rank learns `base` from another rank.
        """
        return pack(None)

    def load(self) -> None:
        """
        Carry out the order to load a checkpoint at the start of the job. Nothing is done, because
        the program itself has loaded its checkpoint.

        Raises `OrderRefused` in a process that has handled an incident or replaces another process.
        """
        if not self.fresh:
            raise OrderRefused(
                "tft wants this rank to load a checkpoint now, but a training script for MindIO "
                "loads checkpoints itself when it starts, and cannot load one while it runs"
            )

    # ---------------------------------------------------------------- out of the loop

    def interrupt(self) -> None:
        """
        Interrupt the training thread, even if that thread waits for other ranks or for the device.
        tft calls this method repeatedly, on a separate thread, until the training thread has
        stopped.
        """
        self._void.set()
        gathering = self._gathering
        if gathering is not None:
            gathering.abort()
        if self._stopping is None and not self.finished:
            # the repair is not known yet: it is chosen only after all ranks have stopped
            self.repair_type = UNKNOWN
            self._stopping = threading.Thread(target=self._stop, name="mindio-stop", daemon=True)
            self._stopping.start()

    def left(self) -> None:
        """
        Complete the stop of this rank, whose program has left its training loop. Call the program's
        function `stop`. If `interrupt` has called that function already, wait for its end instead.

        If the program left its training loop at the end of a step, the function is not called here.
        It is called later if the repair needs that. Raises `OrderRefused` if the function has
        failed.
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
        # catch SystemExit too, because `sys.exit` would end this thread without a message
        except (Exception, SystemExit) as error:
            log.exception("stop_failed")
            self._stop_failed = f"{type(error).__name__}: {error}"

    # ---------------------------------------------------------------- repair

    def regroup(self, name: str, host: str, port: int, place: int, world: int) -> None:
        """
        Exchange facts with the other ranks, clean the device if necessary, and let the program form
        its process groups.

        `name` is the name of the new group of ranks, and `host` and `port` are the address of the
        hub (the server of all-gathers). `world` is the number of ranks that take part. The program
        forms its process groups again only if some ranks have left, have come back or have a new
        process. Raises `OrderRefused` if the ranks do not agree about their groups or steps.
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
            "upgrading": list(self._upgrading),
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
        back |= {int(rank) for told in joined.values() for rank in told["upgrading"]} & {*joined}
        self._scaled = ""
        if len(joined) < self.world and (gone or back or replaced):
            self._scaled = "in"
        elif back:
            self._scaled = "out"
        self._upgrading = tuple(sorted(back)) if self._scaled == "out" else ()
        self._began_at = self.completed()
        first = not self._known and self.incarnation == 0
        self._met = {rank: int(told["incarnation"]) for rank, told in joined.items()}
        self._light = False
        self._fresh = first
        if not first or self._stopped:
            fresh = not self._known
            switched = not self._scaled and _is_switch(joined, replaced)
            # Clean the device of a new process, too, if the program's function `stop` was called in
            # this process. That happens if an earlier attempt to form the group has failed.
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
        Send `facts` about this rank to the other ranks, and wait for the facts of `world` ranks in
        all. Return the facts of each rank, by rank.

        `name` is the name of this all-gather. Raises `ConnectionError` if `interrupt` is called
        meanwhile, or if the hub ends, which serves the all-gather.
        """
        _, host, port = self._group
        self._gathering = gathering = Gathering(host, port)
        try:
            return gathering.join(name, self.rank, world, facts)
        finally:
            self._gathering = None

    def _build(self, new: Sequence[int], members: Sequence[int]) -> None:
        """
        Let the program form its process groups if ranks have left, have come back or have a new
        process. `new` are the ranks that came back or have a new process. `members` are all ranks
        that take part.
        """
        if self._scaled == "in":
            if self.calls_once and self._with_fewer:
                raise OrderRefused(
                    "the job already continues with fewer ranks and cannot give up ranks again: "
                    "the script's function for this can be called only once, because "
                    "MindSpeed-LLM's function always starts from the process groups that it formed "
                    "the first time"
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
                        "enable_zit=True, the groups of ranks that hold the same state must have "
                        "the same layout everywhere"
                    )
        why = agreed_base({rank: each["base"] for rank, each in joined.items()})
        if why:
            raise OrderRefused(why)

    def _replaced(self, stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> list[int]:
        """
        Return the ranks whose processes are new. The process of a rank is new if some other rank,
        which kept its own process, remembers an earlier incarnation of the rank.

        `stayed` has the facts of the ranks that kept their processes, and `joined` has the facts of
        all ranks that take part.
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
                f"the clean function that the training script has registered returned {result!r}, "
                "which means that it could not clean up after the fault; 0 and 2 mean success"
            )
        device.release_memory()  # make device memory free for state from other ranks
        self._stopped = False
        if self.uce and result == 0:
            # The function `clean` has released the memory with the training state, so this rank
            # needs the state of other ranks.
            self._overwritten = True
        self._light = result == 2 and self.uce and not (self.torn or self._overwritten)

    def rebuild(self) -> None:
        """
        Let the programs of the ranks transfer the state that some ranks need. If this rank sends or
        receives state, call the program's repair function.
        """
        said = {
            "needs": [[shard, step] for shard, step in sorted(self._needs.items())],
            "offers": [[shard, step] for shard, step in sorted(self._offers)],
            "base": self.base,
        }
        told = self._gather(f"{self._group[0]}/repair", len(self._told), said)
        units = peer_transfer.units(told, self.world)
        self._repaired = self._repaired or bool(units)
        received = [unit for unit in units if unit.destination == self.rank]
        sent = [unit for unit in units if unit.source == self.rank]
        if received:
            # Take over the number `base` (how the program counts steps) from the sender now,
            # because `program_step` needs it. If `base` is not known, `program_step` raises an
            # error before any state is overwritten.
            self.base = told[received[0].source]["base"]
            self.program_step(received[0].step)
            self._overwritten = True
            lost = self.uce and self.repair_type == "retry"
            kind = RepairType.RT_UCE_HIGHLEVEL if lost else RepairType.RT_RECV_REPAIR
            self._repair(kind, received, units)
            # the state of this rank is complete now, so a later attempt need not repair this rank
            self.uce = self.torn = False
        if sent:
            self._repair(RepairType.RT_SEND, sent, units)

    def rollback(self, local_state: bytes) -> None:
        """
        Set this rank to the step from which all ranks continue, and call the program's rollback
        function. `local_state` is the rank-local state of this rank at the end of that step.

        At the start of a job there is nothing to roll back, so the function is not called. It is
        also not called if the job continues with fewer ranks, and the state of this rank stays as
        it is.
        """
        self.earlier = unpack(local_state) if self._fresh and self.completed() else None
        if not self._fresh:
            self.repaired_to = self.program_step(self.completed())
        elif self.loaded is not None:
            self.base = self.loaded - self.completed()
        moved = self._overwritten or self.completed() != self._began_at or self.torn
        moved, self._repaired = moved or self._repaired, False
        self.uce = self.torn = self._stopped = self._overwritten = self.stepped_out = False
        self._known = self._met
        self._formed = 1 + max((told["formed"] for told in self._told.values()), default=0)
        if self._fresh:
            return
        if self._scaled == "out":
            self.step_is_known = True
            self.handlers.call("zit_upgrade_rollback", self.repaired_to, self.args, SCALE_OUT)
            self._upgrading = ()
            return
        if self._scaled == "in" and not moved:
            # no state was changed or sent, so the program can continue from its last complete step
            self.step_is_known = True
            return
        self.step_is_known = self.handlers.has("rollback")
        if self.step_is_known:
            self.handlers.call("rollback", self.repaired_to, self.args)

    # ---------------------------------------------------------------- state from rank to rank

    def offer(self, shard: str, step: int) -> bytes:
        """
        Record that this rank can send its copy of the shard `shard`, of the end of `step`, to
        another rank. Return a description of the copy, from which `need` learns the step.

        tft calls this method on a separate thread for transfers.
        """
        self._offers.add((shard, step))
        return pack({"step": step})

    def need(self, shard: str, meta: bytes) -> bool:
        """
        Record that this rank needs the shard `shard` from another rank. `meta` is the description
        of the copy, which `offer` has returned on that rank. Return True, because the program
        receives the shard only in `rebuild`.

        Return False if this rank still has the shard, because its device memory was cleaned without
        loss. Raises `OrderRefused` if the program has registered no repair function.
        """
        step = int(unpack(meta)["step"])
        if self._light and self.completed() == step:
            self.uce = False
            return False
        if self._scaled != "out" and not self.handlers.has("repair"):
            raise OrderRefused(
                f"rank {self.rank} needs the shard {shard} from another rank, but the training "
                "script has registered no function that transfers state: call "
                "tft_register_repair_handler"
            )
        self._needs[shard] = step
        return True

    # ---------------------------------------------------------------- a checkpoint of the program itself

    @property
    def reloads(self) -> bool:
        """
        True if the program has a repair function that can load the newest checkpoint that the
        program itself has saved.

        The repair functions of programs for MindSpore cannot load a checkpoint.
        """
        return self.handlers.has("repair") and not self.handlers.mindspore

    def reload(self, not_after: int | None) -> int:
        """
        Let the program's repair function load the newest checkpoint that the program has saved. All
        ranks do this at the same time. Return the step of the checkpoint, by tft's count.

        As its argument `step`, the repair function gets the last step whose training state may be
        right. This is the highest step that any rank has completed. If `not_after` is a lower step,
        it is `not_after` instead.
        """
        # a new process does not know the program's number for step 0 of the job, so it takes the
        # number from another rank
        if self.base is None:
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
        Return the step of the checkpoint that the program has loaded, by tft's count.

        Raises `OrderRefused` if the program has not reported the step, or if the checkpoint was
        saved before this job began.
        """
        if self.loaded is None:
            raise OrderRefused(
                "the script's repair function has loaded a checkpoint, but did not say of which "
                "step: call tft_report_load_ckpt_step in that function"
            )
        first = self.program_step(0)
        if self.loaded < first:
            raise OrderRefused(
                f"the script's repair function has loaded a checkpoint of step {self.loaded}, but "
                f"this job began at step {first}, and tft cannot go back to a step before the "
                f"beginning of the job: load a checkpoint of step {first} or later"
            )
        return self.loaded - first

    def _repair(self, kind: RepairType, own: Sequence[Unit], units: Sequence[Unit]) -> None:
        """
        Call the program's repair function, to send or to receive state as `kind` says. `own` are
        the transfers of this rank, and `units` are all transfers of the repair.

        Raises `TrainingFault` if the function fails with an error after which it cannot be called
        again in this process. tft then replaces the process.
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
                # This exception lets tft replace the process, because a second call of the repair
                # function cannot succeed in the same process.
                raise TrainingFault(str(error), context_lost=True) from error
            raise

    # ---------------------------------------------------------------- the last checkpoint

    def save(self, directory: Path, shards: Sequence[str], step: int, attempt: int) -> list[str]:
        """
        Let the program save the shards `shards` (parts of the training state) that this rank was
        chosen to save. If these shards were saved already in this attempt, do not save them again.

        All chosen ranks save at the same time. Return the name of the file under `directory` that
        lists the saved parts. Raises `OrderRefused` if the program has registered no function that
        saves.
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
                "the state cannot be saved, because the training script has registered no function "
                "that saves it: call tft_register_save_ckpt_handler"
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
        Call the program's function `stop` now, before the device is cleaned, if that function was
        not called yet. Raises `OrderRefused` if the function has failed.
        """
        if not self._stopped:
            self._stop()
        failed, self._stop_failed = self._stop_failed, ""
        if failed:
            raise OrderRefused(f"the program's stop function has failed: {failed}")

    def _savers(self, directory: Path, group: Group, attempt: int) -> list[int]:
        """
        Return the ranks that save the state of `group`: for each part of the state, the rank that
        saves this part.

        Each rank that saves creates an empty file in `directory`, whose name contains the part and
        the rank. This method waits until there is such a file for each part. Raises `OrderRefused`
        if the save is cancelled meanwhile.
        """
        names = [f"{group.shard(part)}.{attempt}" for part in range(group.parts)]
        while not self._void.wait(TICK):
            found = [list(directory.glob(f"{name}.saver-*")) for name in names]
            if all(found):
                return [int(path.name.rpartition("-")[2]) for [path] in found]
        raise OrderRefused("the save was cancelled, because the controller no longer needs it")

    def rename(self, directory: Path, step: int) -> None:
        """
        Let the program give the checkpoint of `step` its final name, because all parts of the
        checkpoint are saved. Do nothing if the checkpoint under `directory` has its final name
        already.
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
    Return whether this repair only moves ranks to processes that were started beforehand
    (successors), while all other ranks have left their training loops at the end of a step.

    `joined` has the facts of all ranks that take part. `replaced` are the ranks with a new process.
    """
    kept = [told for rank, told in joined.items() if rank not in replaced]
    return (
        bool(replaced)
        and all(joined[rank]["successor"] for rank in replaced)
        and all(told["stepped_out"] for told in kept)
    )


def _stayed(joined: Mapping[int, Body]) -> Mapping[int, Body]:
    """
    Return the facts of the staying ranks. The staying ranks are the ranks that took part when
    training last resumed, and whose present processes have trained before. `joined` has the facts
    of all ranks that take part now.
    """
    latest = max(told["formed"] for told in joined.values())
    known = {
        int(r) for told in joined.values() if told["formed"] == latest for r, _ in told["known"]
    }
    return {rank: told for rank, told in joined.items() if rank in known and told["known"]}


def _gone(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    Return the ranks that took part when training last resumed, but do not take part now. `stayed`
    has the facts of the ranks that took part both times in the same process. `joined` has the facts
    of all ranks that take part now.
    """
    return {int(rank) for told in stayed.values() for rank, _ in told["known"]} - joined.keys()


def _back(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    Return the ranks that take part now, but did not take part when training last resumed. `stayed`
    has the facts of the ranks that took part both times in the same process. `joined` has the facts
    of all ranks that take part now.
    """
    return {
        rank
        for told in stayed.values()
        for rank in joined.keys() - {int(each) for each, _ in told["known"]}
    }
