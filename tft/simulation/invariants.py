"""
The invariants of tft, checked against the real state of the simulated cluster. Each invariant has a
name, which says what must hold.
"""

from tft.core.job.commands import JobOver
from tft.core.job.incident import Incident
from tft.protocol.messages import (
    Commit,
    Compare,
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
from tft.simulation.stage import LeaderPart, ProcessPart, Stage
from tft.simulation.survival import lost_needlessly
from tft.simulation.truth import Content, Written

BOUND = 200.0
"""Virtual seconds after the last mishap (injected fault or request) within which the job must be
over. The bound is several times the longest limit of any policy that a schedule can have."""

LEAVING = 8.0
"""The time in virtual seconds within which every process that can be reached learns that the job is
over, and exits."""
REPAIRS = (Fetch, Load, Rebuild, Reload, Rollback)


class Broken(Exception):
    """
    Raised when an invariant does not hold. `promise` is the rule that was broken, which is also the
    name of the invariant. `how` says what has happened instead.
    """

    def __init__(self, promise: str, how: str) -> None:
        super().__init__(f"broken rule: {promise}, but {how}")
        self.promise = promise


class Invariants:
    """
    The checks of the invariants. Each method checks one invariant, or records what a later check
    needs. The simulation calls a method at the moment when its invariant could be broken. A check
    raises `Broken` when its invariant does not hold.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._leader_of: dict[int, int] = {}
        self._steps: dict[tuple[int, int], int] = {}
        self._without: dict[tuple[int, int], tuple[int, ...]] = {}
        """By incident and round: the ranks that take no part in the process groups."""
        self._found: dict[tuple[int, int], set[int]] = {}
        """By incident and round: the steps of the checkpoints that ranks have searched for and
        loaded themselves (order `reload`). Empty until the first rank has loaded a checkpoint."""
        self._stood: dict[int, int] = {}
        """By incident: the highest step that a rank had completed when it was ordered to search for
        a checkpoint itself (order `reload`)."""
        self._savers: dict[tuple[int, int, str], int] = {}
        self._repairing: dict[int, ProcessPart] = {}
        self._since: dict[int, tuple[int, int]] = {}
        """By rank: the node on which the rank last continued training, and the earliest step from
        whose end it continued there. Data positions of this step and later ones are not expected on
        other nodes."""
        self._left: dict[int, int] = {}
        """By rank that no longer takes part in the job: the step from whose end the job continued
        without this rank."""
        self.given_up: set[int] = set()
        """The ranks whose process was not ended in time. It is unknown when the controller learns
        of the rank-local state that such a process has left on its node, so no check expects this
        state.
        """

    def one_leader_obeyed(self, epoch: int, leader: int) -> None:
        """
        Check that ranks obey only one controller in one epoch. `leader` is the number of a
        controller that a rank obeys in `epoch`.
        """
        first = self._leader_of.setdefault(epoch, leader)
        if first != leader:
            raise Broken(
                "an epoch must have only one leader",
                f"processes obey both {first} and {leader} in epoch {epoch}",
            )

    def obeyed(self, process: ProcessPart, order: RankOrder) -> None:
        """
        Check an order that a rank begins to carry out. All orders of a round must name the same
        step, and each shard must be saved by one rank only. If the order is a repair, record the
        rank: no rank may train during a repair.
        """
        step: int | None
        match order:
            case Fetch() | Load() | Restore() | Rollback() | Save() | Commit():
                step = order.step
            case Regroup(step=0):
                step = None  # 0 means that the ranks will find the step in a checkpoint
            case Regroup() | Resume():
                step = order.step - 1
            case _:
                step = None
        key = (order.incident, order.round)
        if isinstance(order, Compare | Regroup):
            self._stopped_before(process, key)
        if isinstance(order, Reload) and process.thread.task is not None:
            self._found.setdefault(key, set())
            stood = self._stood.get(order.incident, 0)
            self._stood[order.incident] = max(stood, process.steps.completed)
        if step is not None and self._steps.setdefault(key, step) != step:
            raise Broken(
                "all ranks must go to the same step",
                f"rank {process.rank} was told to go to step {step} in round {key}, and others to "
                f"step {self._steps[key]}",
            )
        if isinstance(order, Regroup):
            self._without[key] = order.without
        if isinstance(order, Rollback):
            found = self._found.get(key, {order.step})
            if found != {order.step}:
                raise Broken(
                    "all ranks must find the same step",
                    f"ranks found the steps {sorted(found)}, and all were told to resume from "
                    f"{order.step}",
                )
            # record now, and not before the rollback order, without which ranks the job continues:
            # before this order, the job may still go back to a later checkpoint of all ranks
            without = self._without.get(key, ())
            self._stage.truth.go_on_without(order.step, without)
            for rank in without:
                self._left[rank] = min(order.step, self._left.get(rank, order.step))
            self._stage.truth.leave_out(order.step, order.skip)
            if self._stage.pollution.step is not None and order.step < self._stage.pollution.step:
                # all ranks go back to a step before the polluted update, which undoes the update
                self._stage.pollution.step = None
        if isinstance(order, Resume):
            self._left.pop(process.rank, None)
        if isinstance(order, Save):
            for shard in order.shards:
                self.saved_by_one(key, shard, process.rank)
        if isinstance(order, REPAIRS):
            self._repairing[id(process)] = process

    def _stopped_before(self, process: ProcessPart, key: tuple[int, int]) -> None:
        """
        Check that a rank that was ordered to freeze has stopped before it compares or forms groups.
        `key` has the numbers of the incident and the round.
        """
        rank_machine = process.rank_machine
        if rank_machine.heard("freeze") and not rank_machine.answered("stop"):
            raise Broken(
                "a rank must stop before it compares copies and forms groups",
                f"rank {process.rank} has begun to do so in round {key} without having stopped",
            )

    def heeded(
        self, process: ProcessPart, order: RankOrder, epoch: int, key: tuple[int, int]
    ) -> None:
        """
        Check that a rank obeys only orders for its own incarnation. The order must not be older
        than the epoch `epoch`, or than the incident and round in `key`.
        """
        if order.incarnations.get(process.rank, 0) != process.incarnation:
            raise Broken(
                "only the current process of a rank may carry out orders",
                f"incarnation {process.incarnation} of rank {process.rank} carries out an order "
                f"for incarnation {order.incarnations.get(process.rank, 0)}",
            )
        if order.epoch < epoch or (order.incident, order.round) < key:
            raise Broken(
                "orders of an older epoch or round must be ignored",
                f"rank {process.rank} carries out an order of epoch {order.epoch} and round "
                f"{order.round} of incident {order.incident}, although it has had an order of "
                f"epoch {epoch} and round {key}",
            )

    def saved_by_one(self, key: tuple[int, int], shard: str, rank: int) -> None:
        """
        Check that each shard of a last checkpoint is saved by one rank only. `key` has the numbers
        of the incident and the round.
        """
        first = self._savers.setdefault((*key, shard), rank)
        if first != rank:
            raise Broken(
                "each shard must be saved by only one rank",
                f"ranks {first} and {rank} both save shard {shard!r}",
            )

    def finished(self, process: ProcessPart) -> None:
        """
        Record that a rank has carried out its order, and so is not under repair any more.
        """
        self._repairing.pop(id(process), None)

    def nobody_trains_meanwhile(self, trainer: ProcessPart) -> None:
        """
        Check that no rank changes its state by training while the state of another rank is
        repaired.
        """
        for process in self._repairing.values():
            both = (
                self._is_current(trainer)
                and self._is_current(process)
                and self._wanted(process.rank)
            )
            if process.life.alive and not process.thread.stuck and both:
                raise Broken(
                    "no rank may train during a repair",
                    f"rank {trainer.rank} has done step {trainer.steps.completed} while rank "
                    f"{process.rank} carries out "
                    f"{process.thread.task and process.thread.task.name}",
                )

    def steps_alike(self, members: dict[int, ProcessPart]) -> None:
        """
        Check that all members of a process group compute the same step.
        """
        steps = {process.steps.completed for process in members.values()}
        if len(steps) > 1:
            raise Broken(
                "all members of a group must be at the same step",
                f"the members of a process group have done the steps {sorted(steps)}",
            )

    def given_right(self, giver: ProcessPart, shard: str, order: Fetch, content: Content) -> None:
        """
        Check that a rank from which a shard is fetched holds the right content of the step.
        """
        step = order.step
        stages = self._stage.truth.stages(step, shard)
        if content not in stages and not self._excused(content, order):
            raise Broken(
                "shards may be fetched only from sound copies",
                f"rank {giver.rank} gives {self._what(content, shard)} as shard {shard!r} of step "
                f"{step}",
            )

    def found(self, process: ProcessPart, order: RankOrder, step: int) -> None:
        """
        Record the step of the checkpoint that a rank has searched for and loaded itself (order
        `reload`). The step may be later than the step from which all ranks may resume; the
        controller has to notice that.
        """
        if process.group is None or process.collectives.cut:
            return  # ignore a rank that has left its process group: a later round has begun
        self._found[order.incident, order.round].add(step)

    def lost_told(self, incident: Incident) -> None:
        """
        Check the number of lost steps that an incident reports, if the ranks have searched for a
        checkpoint themselves (order `reload`) and returned to it. The report may count one step
        less, because a rank may have finished such a checkpoint after the fault.
        """
        steps = self._found.get((incident.number, incident.round))
        if steps is None:
            return
        cost = max(0, self._stood[incident.number] - max(steps))
        if incident.progress.step != max(steps) + 1 or incident.progress.steps_lost < cost - 1:
            raise Broken(
                "lost steps must be reported",
                f"the report says {incident.progress.steps_lost} lost steps when training resumed "
                f"with step {incident.progress.step}, but {cost} steps were lost: "
                f"the ranks found the steps {sorted(steps)}",
            )

    def repaired_whole(self, process: ProcessPart, order: Fetch | Load | Restore) -> None:
        """
        Check that after a repair every shard of the rank has the content of the agreed step, and is
        neither older nor torn (a mixture of two steps).
        """
        self._whole(
            process,
            order.step,
            "after a repair, each rank must have the agreed state",
            order,
            tail=True,
        )

    def resumes_right(self, process: ProcessPart, order: RankOrder) -> None:
        """
        Check a rank that is ordered to enter the training loop. It must hold the state at the end
        of the step before, and the data position (the number of batches drawn) of that step.
        """
        if not isinstance(order, Resume):
            return
        if process.held() != order.step - 1:
            raise Broken(
                "a rank must resume with the right state",
                f"rank {process.rank} holds the state of step {process.held()} and is told to "
                f"resume with step {order.step}",
            )
        self._whole(process, order.step - 1, "a rank must resume with the right state", order)
        self._positioned(process, order.step - 1, "a rank must resume with the right state")

    def rolled_back(self, process: ProcessPart, step: int) -> None:
        """
        Check that after a rollback a rank has the data position (the number of batches drawn) of
        the agreed step.
        """
        self._positioned(
            process,
            step,
            "after a rollback, each rank must have the data position of the agreed step",
        )
        here = process.node.number
        node, first = self._since.get(process.rank, (here, step))
        self._since[process.rank] = (here, min(first, step) if node == here else step)

    def trained(self, process: ProcessPart, step: int) -> None:
        """
        Check that after every trained step the content of the shards and the data position (the
        number of batches drawn) are those of the undisturbed run.
        """
        if self._repairing:
            self.nobody_trains_meanwhile(process)
        stage = 0 if process.steps.tail else -1
        self._whole(
            process,
            step,
            "every step must have the result of the undisturbed run",
            late=True,
            stage=stage,
        )
        self._positioned(process, step, "every step must have the result of the undisturbed run")

    def ended_step(self, process: ProcessPart, step: int) -> None:
        """
        Check that the content at the end of a step is that of the undisturbed run.
        """
        self._whole(
            process, step, "every step must have the result of the undisturbed run", late=True
        )

    def committed_whole(self, order: Commit, parts: dict[str, Written]) -> None:
        """
        Check that a last checkpoint holds every shard and that each part is right. It must also
        hold the rank-local state of every rank for which the state can still be known (see
        `_remembered`).
        """
        schedule = self._stage.schedule
        wanted: dict[str, Written] = {
            name: self._stage.truth.value(order.step, name) for name in schedule.groups()
        }
        # The rank-local state of a rank is only on its page, in the memory of its node. So expect
        # this state only for ranks whose state was not lost with a node (see `_remembered`).
        right = self._stage.truth.data(order.step)
        wanted |= {f"local-state-{rank}": right for rank in self._remembered(order.step)}
        manifest = {file.name for file in order.files}
        for name, content in wanted.items():
            if name not in manifest:
                raise Broken(
                    "checkpoints must be complete",
                    f"the checkpoint of step {order.step} lacks the file {name}",
                )
            part = parts[name]
            if part != content and not (isinstance(part, Content) and self._excused(part)):
                raise Broken(
                    "checkpoints must be complete",
                    f"the file {name} in the checkpoint of step {order.step} holds "
                    f"{self._what(part, name)}",
                )
        # check only the files of this order: `parts` may also hold files of earlier attempts
        for file in order.files:
            if str(parts.get(file.name)) != file.digest:
                raise Broken(
                    "checkpoints must be complete",
                    f"the content of {file.name} does not match its digest in the manifest",
                )

    # ---------------------------------------------------------------- the end of the job

    def ended_for_a_cause(self, over: JobOver, members: frozenset[int]) -> None:
        """
        Check that a job ends only for a cause: a request, a fault or a limit of the policy.
        """
        happened = {mishap.what for mishap in self._stage.mishaps.happened}
        how = f"it has ended as {over.result} ({over.why}) after {sorted(happened)}"
        match over.result:
            case "completed":
                short = self.short(members)
                if short:
                    raise Broken(
                        "a completed job must have done all steps",
                        f"ranks {short} have not done every step",
                    )
            case "cancelled" if "request" not in happened:
                raise Broken("the job may end only for a cause", how)
            case "dumped" | "failed" if not happened:
                raise Broken("the job may end only for a cause", how)
            case _:
                pass
        if over.result == "dumped" and not self._stage.disk.whole:
            raise Broken(
                "a dumped job must have a complete checkpoint",
                "the disk has no complete checkpoint",
            )
        needless = lost_needlessly(self._stage, over)
        if needless:
            raise Broken(
                "a job must survive a single fault", f"it has ended as {over.result}: {needless}"
            )

    def short(self, members: frozenset[int] | None = None) -> list[int]:
        """
        Return the ranks that have not trained every step. Look only at the ranks in `members`, or
        at all ranks if it is None.
        """
        return [
            process.rank
            for process in self._stage.cluster.processes
            if process.life.alive
            and self._is_current(process)
            and (members is None or process.rank in members)
            and process.steps.completed < self._stage.schedule.steps
        ]

    def ends(self) -> None:
        """
        Check that every incident ends: the job is over within `BOUND` virtual seconds after the
        last mishap (injected fault or request).
        """
        stage = self._stage
        if stage.over is None and stage.clock.now > stage.mishaps.last + BOUND:
            states = [str(leader.machine.state) for leader in stage.cluster.leaders if leader.leads]
            raise Broken(
                "every incident must end",
                f"the job is not over long after the last mishap; its state is {states}",
            )

    def nothing_left(self) -> None:
        """
        Check that no process is left when a job is over. Processes on nodes that cannot be reached
        do not count.
        """
        now = self._stage.clock.now
        left = [
            process.rank
            for process in self._stage.cluster.processes
            if process.life.alive
            and not process.node.connection.link.deaf
            and now - process.node.connection.since > LEAVING
        ]
        if left:
            raise Broken(
                "no process may be left after the job",
                f"the job is over, but processes of ranks {left} still live",
            )

    # ---------------------------------------------------------------- parts of the checks

    def _wanted(self, rank: int) -> bool:
        """
        Return whether a rank is a member of the job. A rank without which the job has continued is
        not a member, and no invariant applies to it.
        """
        return any(rank in leader.machine.members for leader in self._leading())

    def _is_current(self, process: ProcessPart) -> bool:
        """
        Return whether this process holds its rank.
        """
        if process.node.process(process.rank) is not process:
            return False
        return any(
            leader.machine.incarnation(process.rank) == process.incarnation
            for leader in self._leading()
        )

    def _leading(self) -> list[LeaderPart]:
        """
        Return the controllers that lead in the newest epoch. A controller that does not know yet
        that another controller has taken over is left out.
        """
        leading = [leader for leader in self._stage.cluster.leaders if leader.leads]
        newest = max((leader.epoch for leader in leading), default=0)
        return [leader for leader in leading if leader.epoch == newest]

    def _remembered(self, step: int) -> list[int]:
        """
        Return the ranks whose data position of `step` is still known. The position is on the page
        of the rank (shared memory on its node), and the newest leader must know that node. The page
        stays on the node when the process of the rank ends.

        Data positions on the pages of a node that counted as lost do not count: the node has joined
        again, but the ranks may have gone to other nodes meanwhile.

        A rank may have moved to another node. Data positions on its old page count only for steps
        before the move. The data positions of an excluded rank do not count for steps that the job
        has trained without it. A leader that was superseded without noticing it may know nodes that
        are gone, so only the newest leader is asked.
        """
        newest = self._stage.story.epoch
        known = [
            node
            for leader in self._stage.cluster.leaders
            if leader.leads and leader.epoch == newest
            for node in leader.machine.nodes
        ]
        return [
            rank
            for number in known
            for rank, page in self._stage.cluster.nodes[number].pages().items()
            if step in page.local_states() and rank not in self.given_up
            if step <= self._left.get(rank, step)
            if step > self._stage.cluster.nodes[number].left_behind(rank)
            if self._since.get(rank, (number, 0))[0] == number or step < self._since[rank][1]
        ]

    def _excused(
        self, content: Content, order: RankOrder | None = None, *, late: bool = False
    ) -> bool:
        """
        Return whether the controller could not know that `content` is wrong.

        Content of a polluted update is excused until the controller knows of that update. Such
        content is also excused if `order` was sent in a round that began before the controller
        learnt of the update. With `late`, content of a polluted update is always
        excused. Content that a silent corruption changed is always excused here, and so is content
        computed from it: `copies.py` and `slices.py` check whether the comparison of copies finds
        it.
        """
        stage = self._stage
        if content.flipped or content.spread:
            return True
        spread = content.spoilt and stage.pollution.step is not None
        before = order is not None and (order.incident, order.round) < stage.pollution.learnt
        return spread and (late or before or not stage.pollution.known)

    def _whole(
        self,
        process: ProcessPart,
        step: int,
        promise: str,
        order: RankOrder | None = None,
        *,
        late: bool = False,
        tail: bool = False,
        stage: int = -1,
    ) -> None:
        """
        Check that every shard of a rank has the right content of `step`. `stage` selects the moment
        within the step's tail: an index of `Truth.stages`, where -1 is the end of the step. With
        `tail`, the content of any moment of the tail is right. Raises `Broken` with the name
        `promise` otherwise.
        """
        for name, content in process.memory.content.items():
            stages = self._stage.truth.stages(step, name)
            right = stages if tail else (stages[stage],)
            if content not in right and not self._excused(content, order, late=late):
                raise Broken(
                    promise,
                    f"as shard {name!r} of step {step}, rank {process.rank} has "
                    f"{self._what(content, name)}",
                )

    def _positioned(self, process: ProcessPart, step: int, promise: str) -> None:
        begin = self._stage.truth.begin(step)
        if process.memory.data != begin:
            raise Broken(
                promise,
                f"at the end of step {step}, rank {process.rank} has drawn {process.memory.data} "
                f"batches since the start of the job, not {begin}",
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
