"""
Process groups of simulated ranks: how ranks form a group, train a step in it, and fail when a
member is missing.

An all-reduce is complete only when every member has contributed. The result arrives at each member
at a different time. So when a fault happens, some members can be a step ahead of others. The
schedule may also have a collective in the tail of a step (the part after the update window). Its
result too arrives at each member at a different time.
"""

from dataclasses import dataclass, field

from tft.simulation import loop
from tft.simulation.stage import ProcessPart, Stage
from tft.simulation.truth import FLIPPED

PHASES = ("all-reduce", "average")
"""The phases in which a rank waits for the other members of its process group."""


def _is_corrupted(process: ProcessPart) -> bool:
    """
    Return True if a silent corruption has changed the model of a rank. Corrupted settings, such as
    the learning rate, do not count: the gradients do not depend on them.
    """
    return any(content.model % 1 == FLIPPED for content in process.memory.content.values())


class Group:
    """
    A process group: the ranks that have carried out the same regroup order.
    """

    def __init__(self, stage: Stage, members: dict[int, ProcessPart]) -> None:
        self._stage = stage
        self.members = members
        self.broken = False
        """True when a member of the group has ended or has shut its connections."""
        self._building: dict[int, ProcessPart] = {}
        self._arrived: dict[int, ProcessPart] = {}
        self._averaging: dict[int, ProcessPart] = {}
        """The members that wait in the collective of the tail (the part of a step after the update
        window)."""
        self._spoilt = False
        """True when a member of the group has contributed wrong data to the current all-reduces."""
        self._corrupted = False
        """True when a member of the group has computed its contribution from corrupted content. Set
        only in jobs that compare slices (parts of the shards)."""

    # ---------------------------------------------------------------- building the wrappers

    def build(self, process: ProcessPart) -> None:
        """
        Let a member of the group begin to build the framework's wrapper of its model. The builds of
        all members are complete soon after the last member has begun.
        """
        if self.broken:
            return self._stage.clock.after(0.01, process.shut_out, "the group is broken")
        self._building[process.rank] = process
        if len(self._building) == len(self.members):
            takes = self._stage.takes
            for each in self._building.values():
                self._stage.clock.after(takes(0.01, 0.05), each.done, each.thread.task, None)
            self._building = {}
        return None

    # ---------------------------------------------------------------- a step

    def enter(self, processes: list[ProcessPart], step: int) -> None:
        """
        Let members of the group begin to compute a step.
        """
        entering = []
        for process in processes:
            process.thread.phase = "forward"
            if self._stage.mishaps.reached(process, step, "forward"):
                loop.forward(process, step)
                entering.append(process)
        if entering:
            self._stage.clock.after(self._stage.takes(0.08, 0.16), self._sum, entering, step)

    def _sum(self, processes: list[ProcessPart], step: int) -> None:
        for process in processes:
            if (
                process.thread.phase != "forward"
                or process.thread.stuck
                or process.steps.completed != step - 1
            ):
                continue
            if process.collectives.cut or (self.broken and self._stage.schedule.breaks):
                loop.fault(process, "network", "a peer has closed its connection")
                continue
            if self._stage.mishaps.notices(process, step):
                continue
            loop.contribute(process, step)
            if process.collectives.poison or self._is_wrong(process, step - 1):
                self._spoil(step)
            if self._stage.schedule.slices:
                self._corrupted = self._corrupted or _is_corrupted(process)
            self._arrived[process.rank] = process
            self._stage.mishaps.reached(process, step, "all-reduce")
        if len(self._arrived) == len(self.members) and not self.broken:
            self._stage.checks.invariants.steps_alike(self.members)
            self._summed(step)

    def _is_wrong(self, process: ProcessPart, step: int) -> bool:
        """
        Return whether a rank's state differs from the right state of the end of `step`. An
        all-reduce with such a rank spreads wrong data. Silent corruptions do not count. In a job
        that compares slices (parts of the shards), silent corruptions spread with the gradients
        (see `_summed`). In other jobs a silent corruption stays with its rank and with the ranks
        that copy from this rank.
        """
        value = self._stage.truth.value
        return any(
            content != value(step, name) and not (content.flipped or content.spread)
            for name, content in process.memory.content.items()
        )

    def _spoil(self, step: int) -> None:
        """
        Record that the all-reduces of `step` spread wrong data to all members.
        """
        self._spoilt = True
        for process in self.members.values():
            if process.collectives.poison:
                self._stage.mishaps.spread(process)
            process.collectives.poison = False
        if self._stage.pollution.step is None:
            self._stage.pollution.step, self._stage.pollution.known = step, False

    def _summed(self, step: int) -> None:
        """
        Deliver the results of the completed all-reduces to the members. Up to three groups of
        members receive the results at different times. From now on each member can finish the step
        without the other members.
        """
        stage, spoilt = self._stage, self._spoilt
        arrived = list(self._arrived.values())
        wrong = 0
        if self._corrupted:
            wrong = hash(tuple(process.collectives.contributed for process in arrived)) or 1
        self._arrived, self._spoilt, self._corrupted = {}, False, False
        if len(arrived) > 3:
            turn = stage.rng.randrange(len(arrived))
            arrived = arrived[turn:] + arrived[:turn]
        cohorts = 1 + stage.rng.randrange(3)
        for cohort in range(cohorts):
            some = arrived[cohort::cohorts]
            for process in some:
                process.collectives.summed, process.collectives.spoilt = True, spoilt
                process.collectives.wrong_gradients = wrong
            stage.clock.after(stage.takes(0.005, 0.04), self._open, some, step)

    def _open(self, processes: list[ProcessPart], step: int) -> None:
        inside = [
            process
            for process in processes
            if process.thread.phase == "all-reduce"
            and process.collectives.summed
            and process.steps.completed == step - 1
            and process.group is self
            and not process.thread.stuck
            and loop.open_window(process, step)
        ]
        if inside:
            self._stage.clock.after(self._stage.takes(0.01, 0.04), self.close, inside, step)

    def close(self, processes: list[ProcessPart], step: int) -> None:
        """
        Finish the update of a step on some members of the group. Then begin the rest of the step
        (its tail), or the next step if there is no tail.
        """
        going_on = [
            process
            for process in processes
            if process.thread.phase == "window"
            and process.steps.completed == step - 1
            and not process.thread.stuck
            and loop.close_window(process, step)
        ]
        if not going_on:
            return
        if not self._stage.schedule.tail:
            self.enter(going_on, step + 1)
            return
        inside = [process for process in going_on if loop.begin_tail(process, step)]
        for some in self._cohorts(inside):
            self._stage.clock.after(self._tail_takes(), self._settings, some, step)

    # ---------------------------------------------------------------- the tail of a step

    def _cohorts(self, processes: list[ProcessPart]) -> list[list[ProcessPart]]:
        """
        Split processes into one to three groups. The processes of a group take the same time for
        the next part of the step.
        """
        cohorts = 1 + self._stage.rng.randrange(3)
        return [some for n in range(cohorts) if (some := processes[n::cohorts])]

    def _tail_takes(self) -> float:
        return self._stage.takes(0.0, self._stage.schedule.tail / 3)

    def _there(self, processes: list[ProcessPart], step: int, phase: str) -> list[ProcessPart]:
        return [
            process
            for process in processes
            if process.thread.phase == phase
            and process.steps.tail
            and process.steps.completed == step
            and process.group is self
            and not process.thread.stuck
        ]

    def _settings(self, processes: list[ProcessPart], step: int) -> None:
        there = self._there(processes, step, "tail")
        for process in there:
            loop.schedule_settings(process, step)
        if not self._stage.schedule.averages:
            self._stage.clock.after(self._tail_takes(), self._average, there, step, "tail")
            return
        for process in there:
            if process.collectives.cut or (self.broken and self._stage.schedule.breaks):
                loop.fault(process, "network", "a peer has closed its connection")
                continue
            self._averaging[process.rank] = process
            if self._stage.schedule.broadcasts and process.rank == min(self.members):
                self._stage.clock.after(self._tail_takes(), self._average, [process], step, "tail")
                continue
            process.thread.phase, process.collectives.summed = "average", False
            self._stage.mishaps.reached(process, step, "average")
        if len(self._averaging) == len(self.members) and not self.broken:
            arrived, self._averaging = list(self._averaging.values()), {}
            for process in arrived:
                process.collectives.summed = True
            for some in self._cohorts(arrived):
                takes = self._stage.takes(0.005, 0.04)
                self._stage.clock.after(takes, self._average, some, step, "average")

    def _average(self, processes: list[ProcessPart], step: int, phase: str) -> None:
        there = self._there(processes, step, phase)
        inside = [process for process in there if loop.average(process, step)]
        if inside:
            self._stage.clock.after(self._tail_takes(), self._end, inside, step)

    def _end(self, processes: list[ProcessPart], step: int) -> None:
        there = self._there(processes, step, "tail")
        going_on = [process for process in there if loop.end_step(process, step)]
        if going_on:
            self.enter(going_on, step + 1)

    # ---------------------------------------------------------------- breaking a group

    def leave(self, process: ProcessPart, *, loud: bool) -> None:
        """
        Remove a member that has ended or has closed its connections. From then on the group is
        broken: no operation that needs all members can complete. With `loud`, members that wait in
        such an operation may get an exception.
        """
        if self.members.get(process.rank) is not process or (self.broken and not loud):
            return
        self.broken = True
        self._building.pop(process.rank, None)
        waiting = self._arrived or self._building or self._averaging
        if loud and self._stage.schedule.breaks and waiting:
            self._stage.clock.after(self._stage.takes(0.001, 0.2), self._raise)

    def _raise(self) -> None:
        """
        Raise an exception in the members of the group that wait for an operation that can no longer
        complete.
        """
        waiting = [*self._arrived.values(), *self._averaging.values()]
        self._arrived, self._averaging = {}, {}
        building, self._building = list(self._building.values()), {}
        for process in waiting:
            if (
                process.thread.phase in PHASES
                and not process.collectives.summed
                and not process.thread.stuck
            ):
                loop.fault(process, "network", "a peer has closed its connection")
        for process in building:
            process.shut_out("a peer has closed its connection")


@dataclass(slots=True)
class _Meeting:
    waiting: dict[int, ProcessPart] = field(default_factory=dict)
    spoilt: bool = False
    """True when two processes have joined the rendezvous store for one rank. Then no process group
    is formed, because the number of arrivals does not show whether every rank has joined."""


class Groups:
    """
    The rendezvous stores of all nodes. Processes that join a store under the same name form a
    process group.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._meetings: dict[tuple[tuple[str, int], str], _Meeting] = {}

    def join(self, store: tuple[str, int], name: str, process: ProcessPart, members: int) -> None:
        """
        Let a process wait at a rendezvous store until `members` processes have joined under `name`.
        These processes then form a process group.
        """
        meeting = self._meetings.setdefault((store, name), _Meeting())
        if process.rank in meeting.waiting:
            meeting.spoilt = True
        meeting.waiting[process.rank] = process
        if len(meeting.waiting) == members and not meeting.spoilt:
            del self._meetings[store, name]
            group = Group(self._stage, dict(sorted(meeting.waiting.items())))
            for each in group.members.values():
                each.group = group
                each.collectives.cut = False
                takes = self._stage.takes(0.005, 0.05)
                self._stage.clock.after(takes, each.done, each.thread.task, None)

    def leave(self, process: ProcessPart) -> None:
        """
        Remove a process from the rendezvous store at which it waits for the other members of its
        process group.
        """
        for meeting in self._meetings.values():
            if meeting.waiting.get(process.rank) is process:
                del meeting.waiting[process.rank]

    def close(self, store: tuple[str, int]) -> None:
        """
        Fail the current order of all processes that wait at a rendezvous store, because the store
        has closed.
        """
        for key in [key for key in self._meetings if key[0] == store]:
            for process in self._meetings.pop(key).waiting.values():
                process.shut_out("the store has closed the connection")
