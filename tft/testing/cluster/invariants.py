"""
What tft promises, held against what the simulated cluster really does.
"""

from typing import TYPE_CHECKING

from tft.core.commands import JobOver
from tft.core.incident import Incident
from tft.protocol.messages import (
    Commit,
    Fetch,
    Load,
    RankOrder,
    Rebuild,
    Regroup,
    Reload,
    Restore,
    Resume,
    Rollback,
    Save,
)
from tft.testing.cluster.stage import Content, Written
from tft.testing.cluster.survival import lost_needlessly

if TYPE_CHECKING:
    from tft.testing.cluster.leader import Leader
    from tft.testing.cluster.process import Process
    from tft.testing.cluster.stage import Stage

BOUND = 200.0
"""Virtual seconds after the last mishap in which the job must be over: every limit of the policies
that are drawn, several times over."""

LEAVING = 8.0
"""Virtual seconds in which whoever can be reached hears that the job is over, and leaves."""
REPAIRS = (Fetch, Load, Rebuild, Reload, Rollback)


class Broken(Exception):
    """
    A promise was not kept.
    """

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"{promise}: {how}")
        self.promise = promise


class Invariants:
    """
    One method a promise. Each is called where it could be broken.
    """

    def __init__(self, stage: "Stage") -> None:
        self._stage = stage
        self._leader_of: dict[int, int] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._found: dict[tuple[int, int], set[int]] = {}
        """By round: the steps of the checkpoints that ranks have found themselves; none yet where they
        are to."""
        self._stood: dict[int, int] = {}
        """By incident: the highest step at which a rank stood that was told to find one."""
        self._savers: dict[tuple[int, int, str], int] = {}
        self._repairing: dict[int, Process] = {}
        self._since: dict[int, tuple[int, int]] = {}
        """By rank: the node it went on on last, and the first step it has had there."""
        self.given_up: set[int] = set()
        """Ranks that were not ended in time: nobody knows when it is known what they leave behind."""

    def one_leader_obeyed(self, epoch: int, leader: int) -> None:
        """
        No two leaders are obeyed in one epoch.
        """
        first = self._leader_of.setdefault(epoch, leader)
        if first != leader:
            raise Broken(
                "one leader an epoch", f"{first} and {leader} are both obeyed in epoch {epoch}"
            )

    def obeyed(self, process: "Process", order: RankOrder) -> None:
        """
        In one round of an incident there is one agreed step; each shard has one saver; what is
        repaired is repaired while nobody trains.
        """
        step: int | None
        match order:
            case Fetch() | Load() | Restore() | Rollback() | Save() | Commit():
                step = order.step
            case Regroup(step=0):
                step = None  # it is not known yet
            case Regroup() | Resume():
                step = order.step - 1
            case _:
                step = None
        key = (order.incident, order.round)
        if isinstance(order, Reload) and process.task is not None:
            self._found.setdefault(key, set())
            stood = self._stood.get(order.incident, 0)
            self._stood[order.incident] = max(stood, process.completed)
        if step is not None and self._steps.setdefault(key, step) != step:
            raise Broken(
                "one agreed step",
                f"rank {process.rank} is to go to step {step} in round {key}, others to step "
                f"{self._steps[key]}",
            )
        if isinstance(order, Regroup) and step is not None:
            self._stage.truth.go_on_without(step, order.without)
        if isinstance(order, Rollback) and key in self._found:
            if self._found[key] != {order.step}:
                raise Broken(
                    "one step is found",
                    f"{sorted(self._found[key])}, and all go on from {order.step}",
                )
            self._stage.truth.go_on_without(order.step, ())
        if isinstance(order, Rollback):
            self._stage.truth.leave_out(order.step, order.skip)
            if self._stage.polluted is not None and order.step < self._stage.polluted:
                self._stage.polluted = None  # everyone goes back to before it
        if isinstance(order, Save):
            for shard in order.shards:
                self.saved_by_one(key, shard, process.rank)
        if isinstance(order, REPAIRS):
            self._repairing[id(process)] = process

    def heeded(
        self, process: "Process", order: RankOrder, epoch: int, key: tuple[int, int]
    ) -> None:
        """
        Only who holds a rank does what is said to it, and only what is said by the newest leader,
        in the newest round.
        """
        if order.incarnations.get(process.rank, 0) != process.incarnation:
            raise Broken(
                "only who holds the rank obeys",
                f"rank {process.rank}, incarnation {process.incarnation}, obeys in the place of "
                f"{order.incarnations.get(process.rank, 0)}",
            )
        if order.epoch < epoch or (order.incident, order.round) < key:
            raise Broken(
                "nothing old is obeyed",
                f"rank {process.rank} obeys epoch {order.epoch}, round {order.round} of incident "
                f"{order.incident}, after epoch {epoch} and {key}",
            )

    def saved_by_one(self, key: tuple[int, int], shard: str, rank: int) -> None:
        """
        Each shard of a last checkpoint is saved by one rank.
        """
        first = self._savers.setdefault((*key, shard), rank)
        if first != rank:
            raise Broken("one saver", f"shard {shard!r} is saved by ranks {first} and {rank}")

    def finished(self, process: "Process") -> None:
        """
        A rank has carried out what it was told.
        """
        self._repairing.pop(id(process), None)

    def nobody_trains_meanwhile(self, trainer: "Process") -> None:
        """
        No rank changes its state by training while another one's is being repaired.
        """
        for process in self._repairing.values():
            both = (
                self._is_current(trainer)
                and self._is_current(process)
                and self._wanted(process.rank)
            )
            if process.alive and not process.stuck and both:
                raise Broken(
                    "nobody trains during a repair",
                    f"rank {trainer.rank} has done step {trainer.completed} while rank "
                    f"{process.rank} carries out {process.task and process.task.name}",
                )

    def steps_alike(self, members: "dict[int, Process]") -> None:
        """
        Members of a group compute the same step.
        """
        steps = {process.completed for process in members.values()}
        if len(steps) > 1:
            raise Broken("one step in a group", f"members have done steps {sorted(steps)}")

    def given_right(self, giver: "Process", shard: str, order: Fetch, content: Content) -> None:
        """
        A transfer is served by a rank that really holds the right content of that step.
        """
        step = order.step
        stages = self._stage.truth.stages(step, shard)
        if content not in stages and not self._excused(content, order):
            raise Broken(
                "transfers from sound holders",
                f"rank {giver.rank} gives {self._what(content, shard)} as shard {shard!r} of step {step}",
            )

    def found(self, process: "Process", order: RankOrder, step: int) -> None:
        """
        A rank has loaded what it has found itself. What it is shows when it goes on from there: it may be
        too late, which the controller has to notice.
        """
        if process.group is None or process.cut:
            return  # the round is over
        self._found[order.incident, order.round].add(step)

    def lost_told(self, incident: Incident) -> None:
        """
        The steps that finding a checkpoint has cost are told; but for the last, where it was finished
        after the fault.
        """
        steps = self._found.get((incident.number, incident.round))
        if steps is None:
            return
        cost = max(0, self._stood[incident.number] - max(steps))
        if incident.step != max(steps) + 1 or incident.steps_lost < cost - 1:
            raise Broken(
                "what is lost is told",
                f"{incident.steps_lost} steps, on with {incident.step}, and it was {cost} to {steps}",
            )

    def repaired_whole(self, process: "Process", order: Fetch | Load | Restore) -> None:
        """
        After a repair every shard of a rank is that of the agreed step, none older or torn.
        """
        self._whole(process, order.step, "repaired whole", order, tail=True)

    def resumes_right(self, process: "Process", order: RankOrder) -> None:
        """
        Whoever enters the loop holds the end of the step before, and its data position.
        """
        if not isinstance(order, Resume):
            return
        if process.held() != order.step - 1:
            raise Broken(
                "resumes right",
                f"rank {process.rank} holds {process.held()} and resumes at step {order.step}",
            )
        self._whole(process, order.step - 1, "resumes right", order)
        self._positioned(process, order.step - 1, "resumes right")

    def rolled_back(self, process: "Process", step: int) -> None:
        """
        A rollback leads to the data position of the agreed step.
        """
        self._positioned(process, step, "rolled back right")
        here = process.node.number
        node, first = self._since.get(process.rank, (here, step))
        self._since[process.rank] = (here, min(first, step) if node == here else step)

    def trained(self, process: "Process", step: int) -> None:
        """
        After every step trained, content and data position are those of the undisturbed run.
        """
        if self._repairing:
            self.nobody_trains_meanwhile(process)
        stage = 0 if process.tail else -1
        self._whole(process, step, "losses of the undisturbed run", late=True, stage=stage)
        self._positioned(process, step, "losses of the undisturbed run")

    def ended_step(self, process: "Process", step: int) -> None:
        """
        At the end of a step, too, the content is that of the undisturbed run.
        """
        self._whole(process, step, "losses of the undisturbed run", late=True)

    def committed_whole(self, order: Commit, parts: dict[str, Written]) -> None:
        """
        A last checkpoint holds every shard and every rank's own state, each the right one.
        """
        schedule = self._stage.schedule
        wanted: dict[str, Written] = {
            name: self._stage.truth.value(order.step, name) for name in schedule.groups()
        }
        # what is private to a rank is nobody else's: where it went with its node, nobody can save it
        right = self._stage.truth.data(order.step)
        wanted |= {f"private-{rank}": right for rank in self._remembered(order.step)}
        manifest = {file.name for file in order.files}
        for name, content in wanted.items():
            if name not in manifest:
                raise Broken("checkpoints are whole", f"{name} of step {order.step} is missing")
            part = parts[name]
            if part != content and not (isinstance(part, Content) and self._excused(part)):
                raise Broken(
                    "checkpoints are whole",
                    f"{name} of step {order.step} holds {self._what(part, name)}",
                )
        for file in order.files:  # what an earlier try has left besides is named by nobody
            if str(parts.get(file.name)) != file.digest:
                raise Broken("checkpoints are whole", f"{file.name} is not as the manifest says")

    # ---------------------------------------------------------------- the end

    def ended_for_a_cause(self, over: JobOver, members: frozenset[int]) -> None:
        """
        No job is ended without a cause: a request, a fault, a limit of the policy.
        """
        happened = {mishap.what for mishap in self._stage.mishaps.happened}
        how = f"{over.result} ({over.why}) after {sorted(happened)}"
        match over.result:
            case "completed":
                short = self.short(members)
                if short:
                    raise Broken("completed means done", f"ranks {short} have not done every step")
            case "cancelled" if "request" not in happened:
                raise Broken("no end without a cause", how)
            case "dumped" | "failed" if not happened:
                raise Broken("no end without a cause", how)
            case _:
                pass
        if over.result == "dumped" and not self._stage.disk.whole:
            raise Broken("dumped means a checkpoint", "there is none")
        needless = lost_needlessly(self._stage, over)
        if needless:
            raise Broken("a single fault is survived", f"{over.result}: {needless}")

    def short(self, members: frozenset[int] | None = None) -> list[int]:
        """
        The ranks (of these) that have not done every step.
        """
        return [
            process.rank
            for process in self._stage.processes
            if process.alive
            and self._is_current(process)
            and (members is None or process.rank in members)
            and process.completed < self._stage.schedule.steps
        ]

    def ends(self) -> None:
        """
        Every incident ends: some time after the last mishap the job is over.
        """
        stage = self._stage
        if stage.over is None and stage.clock.now > stage.mishaps.last + BOUND:
            states = [str(leader.machine.state) for leader in stage.leaders if leader.leads]
            raise Broken("every incident ends", f"the job is still {states}")

    def nothing_left(self) -> None:
        """
        When a job is over, none of its processes is left.
        """
        now = self._stage.clock.now
        left = [
            process.rank
            for process in self._stage.processes
            if process.alive and not process.node.link.deaf and now - process.node.since > LEAVING
        ]
        if left:
            raise Broken("nothing is left", f"processes of ranks {left} live on")

    # ---------------------------------------------------------------- parts

    def _wanted(self, rank: int) -> bool:
        """
        It is a member: of a rank that was left behind nobody knows what it does.
        """
        return any(rank in leader.machine.members for leader in self._leading())

    def _is_current(self, process: "Process") -> bool:
        """
        Whether this process holds its rank.
        """
        if process.node.process(process.rank) is not process:
            return False
        return any(
            leader.machine.incarnation(process.rank) == process.incarnation
            for leader in self._leading()
        )

    def _leading(self) -> "list[Leader]":
        """
        Who leads: one that was followed by another, and has not heard of it, does not.
        """
        leading = [leader for leader in self._stage.leaders if leader.leads]
        newest = max((leader.epoch for leader in leading), default=0)
        return [leader for leader in leading if leader.epoch == newest]

    def _remembered(self, step: int) -> list[int]:
        """
        The ranks whose own state of a step was captured, on a node that was not given up: there it
        is left when a process ends, and is told then. Of one that has moved since, what another page
        holds of the steps that it has done elsewhere was captured on its way to them by a process that
        did not come there. Given up by whoever leads now: one that was followed by another and has not
        heard of it knows nodes that are gone.
        """
        newest = self._stage.story.epoch
        known = [
            node
            for leader in self._stage.leaders
            if leader.leads and leader.epoch == newest
            for node in leader.machine.nodes
        ]
        return [
            rank
            for number in known
            for rank, page in self._stage.nodes[number].pages().items()
            if step in page.private() and rank not in self.given_up
            if self._since.get(rank, (number, 0))[0] == number or step < self._since[rank][1]
        ]

    def _excused(
        self, content: Content, order: RankOrder | None = None, *, late: bool = False
    ) -> bool:
        """
        Something wrong has spread, and the controller does not know yet, or did not when it said this
        order: that may be on its way still when the controller is told, and has begun another round.
        With `late`, it may have been told at any time. Or nobody was told, and the comparison of copies is to
        find it where it can: see `copies.py`.
        """
        stage = self._stage
        if content.flipped:
            return True
        spread = content.spoilt and stage.polluted is not None
        before = order is not None and (order.incident, order.round) < stage.learnt
        return spread and (late or before or not stage.known)

    def _whole(
        self,
        process: "Process",
        step: int,
        promise: str,
        order: RankOrder | None = None,
        *,
        late: bool = False,
        tail: bool = False,
        stage: int = -1,
    ) -> None:
        """
        With `tail`, it may be what a shard is in the tail of the step; with `stage`, it has to be that.
        """
        for name, content in process.content.items():
            stages = self._stage.truth.stages(step, name)
            right = stages if tail else (stages[stage],)
            if content not in right and not self._excused(content, order, late=late):
                raise Broken(
                    promise,
                    f"rank {process.rank} has {self._what(content, name)} as shard {name!r} of step {step}",
                )

    def _positioned(self, process: "Process", step: int, promise: str) -> None:
        begin = self._stage.truth.begin(step)
        if process.data != begin:
            raise Broken(
                promise,
                f"rank {process.rank} has drawn {process.data} batches after step {step}, not "
                f"{begin}",
            )

    def _what(self, content: Written, shard: str) -> str:
        truth = self._stage.truth
        for step in range(self._stage.schedule.steps + 1):
            stages = truth.stages(step, shard)
            if stages[-1] == content:
                return f"the content of step {step}"
            if content in stages:
                return f"the content of the tail of step {step}"
        return "torn or corrupted content"
