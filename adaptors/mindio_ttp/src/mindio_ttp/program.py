"""
A program for MindIO as tft's hooks see it: what they ask is answered by the functions it has registered.

Its steps are its own: it may have trained before this job began. `base` is the step it was at then.
"""

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mindio_ttp import device, logs, peer_transfer, replicas
from mindio_ttp.exchange import Body, Gathering
from mindio_ttp.handlers import Handlers
from mindio_ttp.peer_transfer import Unit
from mindio_ttp.replicas import Group, agreed_base
from mindio_ttp.torch_groups import GroupNames, Store
from mindio_ttp.words import RepairType
from tft.errors import OrderRefused
from tft.protocol.codec import pack, unpack
from tft.protocol.messages import ShardCopies

log = logs.get_logger()

UNKNOWN = "unknow"
"""MindIO's spelling."""
Scaled = Literal["", "in", "out"]
ELASTIC = ("scale_in", "scale_out")
FUNCTIONS = (
    "zit_downgrade_rebuild", "zit_upgrade_rebuild", "zit_upgrade_repair", "zit_upgrade_rollback",
)  # fmt: skip
"""All are needed for fewer ranks and more again."""
SCALE_IN, SCALE_OUT = '{"scale-in-strategy":"DP"}', '{"scale-out-strategy":"DP"}'
"""What these functions are told last, as clusters say it."""
SOUND = re.compile(r"load ckpt step\s*=\s*(\d+)")
"""How an error of a precision check names the last step of which it knows that it was sound."""
TICK = 0.05
"""Seconds between two looks at what other savers have said."""


@dataclass(slots=True)
class Program:
    """
    Of one rank. `completed` says which step of tft's counting is whole, `incarnation` how many processes
    held the rank before.
    """

    rank: int
    world: int
    handlers: Handlers
    strategies: tuple[str, ...]
    """What it can take part in."""
    group_names: GroupNames = field(default_factory=GroupNames)
    store: Store = field(default_factory=Store)
    """Where a program on torch.distributed meets the others, unless its launcher serves a store."""
    completed: Callable[[], int] = lambda: 0
    incarnation: int = 0
    successor: bool = False
    """This process was started to take over from one that still trained."""
    contributing: Callable[[], None] = lambda: None
    """To be called when the others may finish the step without this rank: nobody sees when a program has
    given them its part, and what only this rank has is the same all along the step."""
    args: Any = None
    """What is handed to every function. Any: the program's own."""
    groups: tuple[Group, ...] = ()
    dense: tuple[int, ...] = ()
    """The data-parallel group of this rank, where it has named that."""
    base: int | None = None
    earlier: int | None = None
    """The base of the run that saved what this one goes on from."""
    loaded: int | None = None
    """The step of the checkpoint that the program has loaded last, if it has said so: before it trains, or
    in its repair function."""
    uce: bool = False
    """This rank has said that its memory is lost."""
    torn: bool = False
    """The update had begun when the loop was left."""
    stepped_out: bool = False
    """The loop was left at the end of a step, where the program can be stopped without losing anything."""
    repaired_to: int = 0
    """The program's step that it was brought to last."""
    repair_type: str = UNKNOWN
    step_is_known: bool = True
    """The program was told what step it was brought to."""
    finished: bool = False
    """All was trained that was to be: there is nothing that the program is to be brought out of."""
    clean_first: bool = False
    """The program's functions to stop and to clean are called before it saves a last checkpoint."""
    calls_once: bool = False
    """Its functions that repair and that go on with fewer ranks keep what they have begun: they can be called once, as by
    MindIO, and not again after they have failed."""
    loses_memory: Callable[[RuntimeError], bool] = lambda error: False
    """Whether an error says that the device has lost memory."""
    _fresh: bool = True
    """No incident has been handled: nothing is to be rolled back."""
    _stopped: bool = False
    """The program's function to stop was called since it was last in its loop."""
    _scaled: Scaled = ""
    """Whether this group was formed with fewer ranks, or with ranks that came back."""
    _began_at: int = 0
    """The step that was whole when this group was formed."""
    _with_fewer: bool = False
    """The program's function was called to go on with fewer ranks, and all are not there again."""
    _repaired: bool = False
    """Some rank has received state in the present group."""
    _light: bool = False
    """The memory that was lost was cleaned, and nothing is to be built or fetched."""
    _formed: int = 0
    """How many groups have gone on; whoever has left has seen fewer."""
    _told: Mapping[int, Body] = field(default_factory=dict)
    """What the ranks of the present group have said of themselves when it was formed."""
    _known: dict[int, int] = field(default_factory=dict)
    """The incarnation of each rank, as of when everybody last went on."""
    _met: dict[int, int] = field(default_factory=dict)
    """The same of the last group, which may have been given up."""
    _gathering: Gathering | None = None
    """Where this rank waits for what the others say."""
    _group: tuple[str, str, int] = ("", "", 0)
    """The name of the present group, and the address of its hub."""
    _stopping: threading.Thread | None = None
    _stop_failed: str = ""
    _needs: dict[str, int] = field(default_factory=dict)
    """By shard: the step of the state that this rank is to receive."""
    _offers: set[tuple[str, int]] = field(default_factory=set)
    """The shards that other ranks were told they can have from this rank, and of which step."""
    _overwritten: bool = False
    """What others have sent was being received: the state is theirs, or a part of it."""
    _void: threading.Event = field(default_factory=threading.Event)
    """What this rank waits for in a save has become void."""
    _saved: tuple[Path, int] | None = None
    """Where the program has saved last, and in which attempt."""

    # ---------------------------------------------------------------- who holds what

    def shards(self) -> Sequence[ShardCopies]:
        """
        One for every group of this rank; of all ranks, where it has told of none.
        """
        if not self.groups:
            everyone = {"rank_list": list(range(self.world)), "replica_cnt": self.world}
            info = [{**everyone, "replica_shift": 0}]
            self.groups = replicas.read(self.rank, self.world, info, whole=True)
        return replicas.shards(self.rank, self.groups)

    def column(self) -> tuple[int, ...]:
        """
        The ranks that leave together with this one.
        """
        return self._column() or (self.rank,)

    def _column(self) -> tuple[int, ...] | None:
        partitions = [group.ranks for group in self.groups]
        if self.dense and all(len(ranks) > len(self.dense) for ranks in partitions):
            partitions.append(self.dense)  # what is split among peers splits the groups, too
        return replicas.column(self.rank, self.world, partitions)

    def settle_strategies(self) -> None:
        """
        All functions are registered and all groups are told of: what it can really take part in.
        """
        missing = [name for name in FUNCTIONS if not self.handlers.has(name)]
        self.shards()
        why = ""
        if missing:
            why = f"these functions are not registered: {', '.join(missing)}"
        elif self._column() is None:
            why = "its groups are not laid out alike all over the ranks, so that nobody knows who leaves together"
        if why and "scale_in" in self.strategies:
            log.warning("ranks_cannot_leave", why=why)
            self.strategies = tuple(s for s in self.strategies if s not in ELASTIC)

    def program_step(self, step: int) -> int:
        """
        What the program calls a step of ours. Raises `OrderRefused` while that is not known.
        """
        if self.base is None:
            raise OrderRefused(
                "no step of this program was completed since it was started, so that nobody knows which one "
                "it is at: before that nothing can be repaired or saved, and nothing is lost. "
                "tft_report_load_ckpt_step says it for a program that goes on from a checkpoint"
            )
        return step + self.base

    def sound_step(self, said: str) -> int | None:
        """
        Return the step, as tft counts, that an error names as the last sound one; None where it names none. Source:
        `handle_precision_error` of MindSpeed-LLM, which loads the checkpoint of that step.
        """
        named = SOUND.search(said)
        if named is None or self.base is None:
            return None
        return max(0, int(named[1]) - self.base)

    @property
    def fresh(self) -> bool:
        """
        No incident has been handled in this process, which takes nobody's place.
        """
        return self._fresh and self.incarnation == 0

    def brought_to(self, step: int) -> None:
        """
        The state is that of the end of this step, as the program counts.
        """
        self.base = step - self.completed()
        self.repaired_to = step

    def private(self) -> bytes:
        """
        What only this rank has: nothing that its program does not make anew, but how it counts.
        """
        return pack(self.base)

    def derive(self) -> bytes:
        """
        The same where it went with a node: how the others count is known from them.
        """
        return pack(None)

    def load(self) -> None:
        """
        The job goes on from a checkpoint: the program has read its own before it trains.
        """
        if not self.fresh:
            raise OrderRefused(
                "a program for MindIO reads its checkpoints itself, when it starts: it cannot be brought back "
                "to one while it runs"
            )

    # ---------------------------------------------------------------- out of the loop

    def interrupt(self) -> None:
        """
        Have the training thread leave whatever it waits in. On the control thread, again and again.
        """
        self._void.set()
        gathering = self._gathering
        if gathering is not None:
            gathering.abort()
        if self._stopping is None and not self.finished:
            self.repair_type = UNKNOWN  # until everybody stands still nothing is chosen
            self._stopping = threading.Thread(target=self._stop, name="mindio-stop", daemon=True)
            self._stopping.start()

    def left(self) -> None:
        """
        The loop has been left, by all: every rank's functions for that are called, once. Who has left it at
        the end of a step is stopped when it is known what for.
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

    # ---------------------------------------------------------------- the way back

    def regroup(self, name: str, host: str, port: int, place: int, world: int) -> None:
        """
        Meet the others, clean what is to be cleaned, and have the program form its groups anew if some
        have come anew.
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
            # a replacement that an earlier round has stopped has a stopped device, too
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
        Wait for `world` ranks; return what each has said. `interrupt` ends the wait.
        """
        _, host, port = self._group
        self._gathering = gathering = Gathering(host, port)
        try:
            return gathering.join(name, self.rank, world, facts)
        finally:
            self._gathering = None

    def _build(self, new: Sequence[int], members: Sequence[int]) -> None:
        """
        Have the program form its groups, where they are others, or have others in them.
        """
        if self._scaled == "in":
            if self.calls_once and self._with_fewer:
                raise OrderRefused(
                    "the program goes on with fewer ranks already, and its function for that can be called once: "
                    "MindSpeed-LLM's counts from the groups that it has formed"
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
                        f"rank {rank} would leave together with ranks {each['column']}, and rank {peer} with "
                        f"{joined[peer]['column']}: with enable_zit the groups are to be laid out alike"
                    )
        why = agreed_base({rank: each["base"] for rank, each in joined.items()})
        if why:
            raise OrderRefused(why)

    def _replaced(self, stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> list[int]:
        """
        The ranks with a process that somebody has not met.
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
            raise OrderRefused(f"the program's clean function says {result!r}: it could not clean")
        device.release_memory()  # for the state that comes
        self._stopped = False
        if self.uce and result == 0:
            # the program has given up its memory: no later answer brings that back
            self._overwritten = True
        self._light = result == 2 and self.uce and not (self.torn or self._overwritten)

    def rebuild(self) -> None:
        """
        Have the program move the state that ranks need, in one call on each rank that takes part.
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
            # before anything is overwritten: the step could not be named without it
            self.base = told[received[0].source]["base"]
            self.program_step(received[0].step)
            self._overwritten = True
            lost = self.uce and self.repair_type == "retry"
            kind = RepairType.RT_UCE_HIGHLEVEL if lost else RepairType.RT_RECV_REPAIR
            self._repair(kind, received, units)
            # its state is whole: a later round has nothing to repair here
            self.uce = self.torn = False
        if sent:
            self._repair(RepairType.RT_SEND, sent, units)

    def rollback(self, private: bytes) -> None:
        """
        Everyone goes on from one step.
        """
        self.earlier = unpack(private) if self._fresh and self.completed() else None
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
            self.step_is_known = True  # it is at the step that it has completed last
            return
        self.step_is_known = self.handlers.has("rollback")
        if self.step_is_known:
            self.handlers.call("rollback", self.repaired_to, self.args)

    # ---------------------------------------------------------------- state from rank to rank

    def offer(self, shard: str, step: int) -> bytes:
        """
        Note that another rank can have a shard from this one. On a transfer thread.
        """
        self._offers.add((shard, step))
        return pack({"step": step})

    def need(self, shard: str, meta: bytes) -> bool:
        """
        Note that this rank needs a shard, which it receives in `rebuild`. Returns False where it has the shard: its
        memory was cleaned, and nothing in it was lost.
        """
        step = int(unpack(meta)["step"])
        if self._light and self.completed() == step:
            self.uce = False
            return False
        if self._scaled != "out" and not self.handlers.has("repair"):
            raise OrderRefused(
                f"the program has registered no repair function, and rank {self.rank} needs {shard} of "
                "another rank: tft_register_repair_handler"
            )
        self._needs[shard] = step
        return True

    # ---------------------------------------------------------------- a checkpoint of its own

    @property
    def reloads(self) -> bool:
        """
        The program's repair function can be told to load the newest checkpoint that it keeps itself. Those
        of MindSpore are not.
        """
        return self.handlers.has("repair") and not self.handlers.mindspore

    def reload(self, not_after: int | None) -> int:
        """
        Have the program load it, on all ranks at once; returns which step of ours that is. What it is told
        as the step to be repaired is the last one that may be sound.
        """
        if self.base is None:  # it takes the place of another one: the others know how it counts
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
        if self.loaded is None:
            raise OrderRefused(
                "the program's repair function has loaded a checkpoint, and nobody knows of which step: "
                "tft_report_load_ckpt_step says it"
            )
        first = self.program_step(0)
        if self.loaded < first:
            raise OrderRefused(
                f"the program has loaded a checkpoint of step {self.loaded}, and it began this job at step "
                f"{first}: the job does not know of any earlier one"
            )
        return self.loaded - first

    def _repair(self, kind: RepairType, own: Sequence[Unit], units: Sequence[Unit]) -> None:
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
                error.tft_context_lost = True  # type: ignore[attr-defined]  # it gets another process
            raise

    # ---------------------------------------------------------------- the last checkpoint

    def save(self, directory: Path, shards: Sequence[str], step: int, attempt: int) -> list[str]:
        """
        Have the program save all that this rank was chosen for, once in an attempt, with the others who
        were chosen.
        """
        if not attempt:
            raise OrderRefused(
                "a program for MindIO saves each part once: there are no copies of it"
            )
        name = f"mindio-{self.rank}.json"
        if self._saved == (directory, attempt):
            return [name]
        if not self.handlers.has("save_ckpt"):
            raise OrderRefused(
                "the program has registered no function that saves: tft_register_save_ckpt_handler"
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
        Have the program's function called that stops, if it was not.
        """
        if not self._stopped:
            self._stop()
        failed, self._stop_failed = self._stop_failed, ""
        if failed:
            raise OrderRefused(f"the program's stop function has failed: {failed}")

    def _savers(self, directory: Path, group: Group, attempt: int) -> list[int]:
        """
        Who saves each part of a group, in the order of the parts. Each says so when it has come so far.
        """
        names = [f"{group.shard(part)}.{attempt}" for part in range(group.parts)]
        while not self._void.wait(TICK):
            found = [list(directory.glob(f"{name}.saver-*")) for name in names]
            if all(found):
                return [int(path.name.rpartition("-")[2]) for [path] in found]
        raise OrderRefused("the save was given up: its order is no longer wanted")

    def rename(self, directory: Path, step: int) -> None:
        """
        All is saved: the program gives it its name, once.
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
    Nothing has happened but that others have taken over: everybody has come to the end of a step.
    """
    kept = [told for rank, told in joined.items() if rank not in replaced]
    return (
        bool(replaced)
        and all(joined[rank]["successor"] for rank in replaced)
        and all(told["stepped_out"] for told in kept)
    )


def _stayed(joined: Mapping[int, Body]) -> Mapping[int, Body]:
    """
    Those who were there when everybody last went on, and still know who that was.
    """
    latest = max(told["formed"] for told in joined.values())
    known = {
        int(r) for told in joined.values() if told["formed"] == latest for r, _ in told["known"]
    }
    return {rank: told for rank, told in joined.items() if rank in known and told["known"]}


def _gone(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    The ranks that somebody has last gone on with, and that are not there.
    """
    return {int(rank) for told in stayed.values() for rank, _ in told["known"]} - joined.keys()


def _back(stayed: Mapping[int, Body], joined: Mapping[int, Body]) -> set[int]:
    """
    The ranks that somebody has last gone on without.
    """
    return {
        rank
        for told in stayed.values()
        for rank in joined.keys() - {int(each) for each, _ in told["known"]}
    }
