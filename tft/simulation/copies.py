"""
An independent check of how the job machine compares the copies of a shard. It checks which
differences the machine has to find, and from which content the job must not continue.
"""

from collections import Counter
from collections.abc import Mapping

from tft.core.job.machine import Machine
from tft.protocol.messages import (
    Answered,
    Checkpointed,
    Faulted,
    Fetch,
    Load,
    Noticed,
    RankOrder,
    Regroup,
    Restore,
    Rollback,
    Save,
)
from tft.simulation.invariants import Broken
from tft.simulation.ledger import DOUBTFUL, Ledger
from tft.simulation.stage import ProcessPart, Stage
from tft.simulation.truth import Content

Digests = tuple[tuple[str, str], ...]
"""The digests of one shard: pairs of a part (`model` or `settings`) and its digest."""


class Copies:
    """
    Compares what ranks report about their copies with the real content of the copies. When it is
    uncertain which copies are right, the check passes.
    """

    def __init__(self, stage: Stage, ledger: Ledger) -> None:
        self._stage = stage
        self._ledger = ledger
        self._compared = stage.schedule.resume
        """The last step at whose end a comparison has found all copies equal, or from whose end all
        ranks continued together."""
        self._bar: int | None = None
        """The latest step from which the job may continue, while copies differ and it is not known
        which copies are right. None if there is no limit."""
        self._most: dict[tuple[str, int], Digests] = {}
        """By shard and step: the digests that count as right, because most or all ranks hold them.
        """
        self._unlike: set[str] = set()
        """The shards for which the event `begins_unlike` (ranks begin with different copies) was
        logged."""
        self.disputed: set[int] = set()
        """The ranks whose copies differ while it is not known which copies are right."""
        self._suspected: set[int] = set()
        """The ranks whose copies were put in doubt since all ranks last continued together."""
        self._brought: set[tuple[int, int]] = set()
        """Rank and incarnation of the processes that have fetched state since all ranks last
        continued together. They have their copies from other ranks, so an equal copy does not show
        that the copy of another rank is right."""
        self._passed_over: dict[tuple[int, int], int] = {}
        """By rank and incarnation of a process that took the copy of another rank while it was not
        known which of the two copies was right: the step of the copy. The copies of this step and
        of earlier steps that the process keeps itself may be wrong."""
        self._inexact: int | None = None
        """The step from whose tail (after the update window, before the end of the step) this
        incident lets all ranks continue. None if all ranks continue from the end of a step."""

    def suspects(self, rank: int) -> bool:
        """
        Return True if the copies of a rank were put in doubt since all ranks last continued
        together.
        """
        return rank in self._suspected

    def may_be_used(self, rank: int, incarnation: int, step: int) -> bool:
        """
        Return True if the copy of `step` that a process keeps may be used. If the process had to
        take the copy of another rank instead of its own, only copies of steps after that copy may
        be used.
        """
        return step > self._passed_over.get((rank, incarnation), -1)

    def suspect(self, rank: int) -> None:
        """
        Record that the copies of shards that a rank holds may be wrong.
        """
        self._suspected.add(rank)

    def were_equal(self, step: int) -> None:
        """
        Record that the copies of each shard were equal at the end of `step`, as the comparison of
        slices (parts of the shards) has shown.
        """
        self._compared = max(self._compared, step)

    def judged(self, machine: Machine, report: object) -> None:
        """
        Record a report that the job machine has handled. A report counts only if it comes from the
        process that currently holds its rank.
        """
        match report:
            case Checkpointed(compared=True):
                # a report of the rank's newest incarnation counts, even if that process has died
                if report.incarnation == machine.incarnation(report.rank):
                    self._compared = max(self._compared, report.step)
            case _:
                pass

    def hears(self, report: object) -> None:
        """
        Record a report that the job machine is about to handle.
        """
        match report:
            case Faulted(rank=rank) if report.kind in DOUBTFUL or report.context_lost:
                self._suspected.add(rank)
            case Noticed(rank=rank) if report.kind in DOUBTFUL:
                self._suspected.add(rank)
            case Answered(rank=rank) if report.failure is not None:
                self._suspected.add(rank)
            case Answered(rank=rank, order="fetch"):
                # an answer to a fetch order of an earlier round does not count
                if (report.incident, report.round) == self._ledger.key:
                    self._brought.add((rank, report.incarnation))
                    if rank in self.disputed:
                        self._passed_over[rank, report.incarnation] = report.position.step
            case _:
                pass

    # ---------------------------------------------------------------- the comparison of the copies of a shard

    def stopped(self, ceiling: int | None) -> None:
        """
        Compute which digests of each shard count as right: those of the majority of the ranks. Call
        this when all ranks have left the training loop and reported the digests of their state.
        Copies of steps later than `ceiling` are known to be unsound and are ignored.
        """
        self._most.clear()
        votes: dict[tuple[str, int], list[Answered]] = {}
        for answer in self._said():
            step = answer.held
            if step is None or (ceiling is not None and step > ceiling):
                continue
            if not step:
                # at step 0 ranks may hold different content: the event `begins_unlike` reports the
                # difference, so no vote is needed
                continue
            for shard in answer.digests:
                votes.setdefault((shard, step), []).append(answer)
        for (shard, step), answers in votes.items():
            ended = [
                answer
                for answer in answers
                if not answer.position.tail
                and (answer.rank, answer.incarnation) not in self._brought
            ]
            held = Counter(_digests(answer, shard) for answer in ended)
            doubt = {answer.rank for answer in ended} & (self._suspected | self._ledger.searching)
            gone = {
                (answer.rank, answer.incarnation) for answer in ended
            } & self._ledger.processes.vanished
            if not held or ((doubt or gone) and len(held) > 1):
                continue
            (best, most), *others = held.most_common()
            if not others or most > max(1, others[0][1]):
                self._most[shard, step] = best
            elif self._stage.schedule.policy.corruption != "continue":
                self._bar = self._compared if self._bar is None else min(self._bar, self._compared)

    def _said(self) -> list[Answered]:
        """
        Return the answers of the living ranks to the `compare` order of the current round.
        """
        ledger = self._ledger
        return [
            answer
            for rank, answer in ledger.answers.get("compare", {}).items()
            if (answer.incident, answer.round) == ledger.key
            and (rank, answer.incarnation) not in ledger.processes.ended
        ]

    def differ(self, machine: Machine, facts: Mapping[str, object], *, stopped: bool) -> None:
        """
        Check the event `copies_differ`, which names the ranks with right and with wrong copies.
        Raises `Broken` when a rank named as wrong holds the digests of the majority. From now on
        the auditor accepts that a rank named as wrong is ended.
        """
        shard, step = str(facts["shard"]), int(str(facts["step"]))
        right: list[int] = facts["right"]  # type: ignore[assignment] # a list of ranks
        wrong: list[int] = facts["wrong"]  # type: ignore[assignment] # a list of ranks
        answers = {answer.rank: answer for answer in self._said()} if stopped else {}
        most = self._most.get((shard, step))
        if not right:
            self.disputed.update(wrong)
        for rank in wrong:
            answer = answers.get(rank)
            if answer is not None and answer.position.tail:
                continue
            if answer is not None and most is not None and _digests(answer, shard) == most:
                raise Broken(
                    "the content that most ranks hold must count as right",
                    f"rank {rank} holds this content, but the controller reported that its copy differs",
                )
            self._not_of_the_tail(machine, rank, right, shard, step)
            if right:
                self._ledger.name(rank, machine.incarnation(rank))
                self._ledger.doubted.add(rank)
                self._suspected.add(rank)

    def begin_unlike(self, facts: Mapping[str, object]) -> None:
        """
        Check the event `begins_unlike`: ranks begin with different copies of a shard. Raises
        `Broken` when all digests that were reported are equal.
        """
        shard = str(facts["shard"])
        said = {
            _digests(answer, shard)
            for order in ("compare", "fetch", "restore", "reload")
            for answer in self._ledger.answers.get(order, {}).values()
            if shard in answer.digests
        }
        if len(said) < 2:
            raise Broken(
                "a copy that differs must be reported",
                f"the ranks have reported equal digests of shard {shard!r}, whose copies differ",
            )
        self._unlike.add(shard)

    def _not_of_the_tail(
        self, machine: Machine, wrong: int, right: list[int], shard: str, step: int
    ) -> None:
        """
        Check the rank `wrong`, which is said to have a wrong copy of `step`. Raises `Broken` when
        this rank has the content of the end of the step, while a rank in `right` has content of the
        step's tail (between the update window and the end of the step).
        """
        process = self._process(machine, wrong)
        stages = self._stage.truth.stages(step, shard)
        if process is None or process.steps.tail or process.held() != step:
            return
        others = [each for rank in right if (each := self._process(machine, rank)) is not None]
        if process.memory.content[shard] != stages[-1] or process.memory.unsaid:
            return
        if any(other.memory.content[shard] in stages[:-1] for other in others):
            raise Broken(
                "state from the end of a step must not be replaced by state from its tail",
                f"rank {wrong} has ended step {step}, but was told to replace shard {shard!r} with a "
                "copy from the tail of the step",
            )

    # ---------------------------------------------------------------- consequences

    def ordered(self, machine: Machine, order: RankOrder) -> None:
        """
        Check that an order of the job machine uses only copies of shards that may be used. Raises
        `Broken` otherwise.
        """
        match order:
            case Regroup() if order.step:
                self._early(order.step - 1)
            case Load() | Fetch() | Restore():
                self._early(order.step)
            case Save():
                self._early(order.step)
                self._saved(machine, order)
            case Rollback():
                self._early(order.step)
                self._gone_on_from(machine, order.step)
            case _:
                pass

    def resumed(self, step: int) -> None:
        """
        Forget what earlier comparisons of copies have found, because all ranks resume training
        after the end of `step`.
        """
        self._compared, self._bar = step, None
        self._unlike.clear()
        self._suspected.clear()
        self.disputed.clear()
        self._brought.clear()

    def closed(self, machine: Machine) -> None:
        """
        Check, at the end of an incident, that the incident reported an inexact step. A step is
        inexact when all ranks continue from content of the step's tail (between the update window
        and the end of the step) instead of the content of its end. Raises `Broken` when an inexact
        step was not reported.
        """
        told, inexact = machine.incident.exactness.sentences, self._inexact
        self._inexact = None
        if inexact is not None and machine.incident.progress.step == inexact + 1 and not told:
            raise Broken(
                "an inexact recovery must be reported",
                f"training resumed from step {inexact}, and the report calls the incident exact",
            )

    def _early(self, step: int) -> None:
        if self._bar is not None and step > self._bar:
            raise Broken(
                "a copy of unknown correctness must not be used",
                f"step {step} was chosen, although copies differ and were last compared at step "
                f"{self._bar}",
            )

    def _gone_on_from(self, machine: Machine, step: int) -> None:
        """
        Check that all members hold equal copies of the content from which they continue. The right
        content is that of the end of `step`. If no rank has this content, equal content from the
        step's tail (after its update window) is accepted. Raises `Broken` otherwise.
        """
        self._stage.truth.unbend_after(step)
        for shard, ranks in self._stage.schedule.groups().items():
            held: dict[Content, int] = {}
            unsaid: set[Content] = set()
            for rank in ranks:
                process = self._process(machine, rank)
                if rank not in machine.members or process is None or process.held() != step:
                    continue
                content = process.memory.content[shard]
                # do not compare the content of a rank that has not reported its silent corruption
                # yet: the corruption may be in this shard or in another shard
                if process.memory.unsaid:
                    unsaid.add(content)
                elif not (content.wrong or content.spoilt):
                    held[content] = rank
            unlike = step == 0 and shard in self._unlike
            if len(held) > 1 and not unlike:
                raise Broken(
                    "copies must be equal when training resumes",
                    f"ranks {sorted(held.values())} hold different copies of shard {shard!r} of "
                    f"step {step}: {sorted(held)}",
                )
            for content, rank in held.items():
                self._sound(machine, rank, shard, step, content.plain())
            for content in () if held else unsaid:
                self._bend_to_tail(machine, shard, step, content.plain())

    def _saved(self, machine: Machine, order: Save) -> None:
        self._stage.truth.unbend_after(order.step)
        for rank in order.to:
            process = self._process(machine, rank)
            for shard in order.shards if process is not None else ():
                assert process is not None
                content = process.memory.content[shard].plain()
                if not process.memory.unsaid:
                    self._sound(machine, rank, shard, order.step, content)
                else:
                    self._bend_to_tail(machine, shard, order.step, content)

    def _bend_to_tail(self, machine: Machine, shard: str, step: int, content: Content) -> None:
        """
        Count content from the tail of `step` (after its update window) as right if the incident has
        reported that training continues from the tail and not from the end of the step.
        """
        truth = self._stage.truth
        if machine.incident.exactness.sentences and content in truth.stages(step, shard):
            truth.bend(step, shard, content)

    def _sound(self, machine: Machine, rank: int, shard: str, step: int, content: Content) -> None:
        truth = self._stage.truth
        right = truth.value(step, shard)
        if content == right:
            return
        what = f"shard {shard!r} of step {step} as rank {rank} holds it"
        if content.flipped and self._most.get((shard, step)) == tuple(right.digests().items()):
            raise Broken(
                "the content that most ranks hold must count as right",
                f"{what} is not the content that most ranks hold",
            )
        # ignore content that belongs to no moment of the step: `Invariants` reports such content
        # when a rank uses it
        if content not in truth.stages(step, shard):
            return
        if not machine.incident.exactness.sentences:
            raise Broken(
                "an inexact recovery must be reported",
                f"{what} comes from the tail of the step, and the report calls the incident exact",
            )
        for answer in self._said():
            if (
                answer.held == step
                and not answer.position.tail
                and answer.rank not in self._suspected
                and answer.digests.get(shard) == right.digests()
            ):
                raise Broken(
                    "state from the end of a step must not be replaced by state from its tail",
                    f"{what} comes from the tail of the step, although rank {answer.rank} had ended "
                    f"the step",
                )
        self._inexact = step
        truth.bend(step, shard, content)

    def _process(self, machine: Machine, rank: int) -> ProcessPart | None:
        node = self._stage.cluster.nodes.get(self._ledger.place(machine, rank))
        process = None if node is None else node.process(rank)
        if process is None or process.incarnation != machine.incarnation(rank):
            return None
        return process if process.life.alive else None


def _digests(answer: Answered, shard: str) -> Digests:
    return tuple(answer.digests[shard].items())
