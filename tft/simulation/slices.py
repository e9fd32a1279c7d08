"""
An independent check of the comparison of slices (in each step, the ranks compare digests of one
part of each shard). It records the real content of each rank at the end of each step. Each verdict
of the comparison must agree with this record, and copies that differ must be found in time.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tft.core.job.commands import Tell
from tft.core.job.events import Event, SlicesAgreed, SlicesDiffered
from tft.core.job.machine import Machine
from tft.core.job.transitions import State
from tft.protocol.messages import Resume
from tft.simulation.invariants import Broken
from tft.simulation.ledger import Ledger
from tft.simulation.stage import ProcessPart, Stage
from tft.simulation.truth import Content

FOUND = 1.5
"""Seconds after the end of a step within which the controller knows that copies differ: within this
time each node sends several heartbeats."""
DISTURBING = ("node", "partition", "broker", "beats", "agent", "deposed")
"""The kinds of mishaps (injected faults) that keep heartbeats from a controller. After such a
mishap it is unknown when a controller receives a digest, so checks that depend on this are skipped.
"""
LATE_WORDS = frozenset(
    {"copies_differ", "slices_differ", "checkpoint_differs", "corruption_traced"}
)
"""The log events that report, after a difference was found, which ranks hold wrong copies."""

Attempt = tuple[int, int]
"""The numbers of an incident and of its round."""
Held = dict[int, dict[str, Content]]
"""By rank and shard: the content at the end of a step."""


@dataclass(slots=True)
class Found:
    """
    A difference between copies of a shard that the job machine has been told. The difference is
    forgotten when all ranks are ordered to resume.
    """

    sound: int
    """The last step at whose end the slice that differs now was equal on all ranks."""
    decided: bool
    """True when most copies are equal, so that the copies of the majority count as right."""


@dataclass(slots=True)
class _Dispute:
    """
    A finding that copies differ without a majority: the number of its incident (-1 until the
    incident is open), and the ranks that really held corrupted content.
    """

    incident: int
    corrupted: frozenset[int]


@dataclass(slots=True)
class _Record:
    """
    The real content of the ranks at the end of each step since they were last ordered to resume.
    """

    attempt: Attempt = (-1, 0)
    begun: int = 0
    """The step from whose end the ranks have resumed training."""
    held: dict[int, Held] = field(default_factory=dict)
    """By step: the content of each rank at the end of the step."""
    members: dict[int, frozenset[int]] = field(default_factory=dict)
    """By step: the ranks of the process group."""
    clean: bool = True
    """True when the ranks have resumed with right content, and no shard with a single holder was
    corrupted since then. No comparison can find such a corruption."""


def _is_wrong(process: ProcessPart) -> bool:
    return any(content.flipped or content.spread for content in process.memory.content.values())


class Slices:
    """
    Compares the verdicts about slices (parts of the shards) with the real content of the ranks.
    """

    def __init__(self, stage: Stage, ledger: Ledger) -> None:
        self._stage = stage
        self._ledger = ledger
        self._record = _Record()
        self._frozen: float | None = None
        """The moment at which the ranks were first asked for their positions (order `freeze`) since
        they last resumed training. None if they were not asked since then."""
        self._pending: list[tuple[Attempt, float, str]] = []
        """The attempt, the time and the shard of each slice that differs."""
        self._led = 0.0
        """The moment at which the present controller began to lead."""
        self._disputes: list[_Dispute] = []
        self._corrupted: set[int] = set()
        """The ranks that have held corrupted content at the end of a step."""
        self._counts: dict[tuple[int, int], set[int]] = {}
        """By rank and node: the numbers of the incidents in which the copies of the rank were
        wrong."""
        self.found: Found | None = None
        """The difference between copies that the job machine was told last. None if there was none
        since all ranks were last ordered to resume."""
        self._sound: int | None = None
        """The last step before copies differed, if the ranks were ordered to resume from a later
        step. None otherwise, and after the incident has closed."""
        self.left: set[int] = set()
        """The nodes that may be given up, since a rank on them had wrong copies twice."""

    # ---------------------------------------------------------------- the real content

    def resumes(self, order: Resume, members: Mapping[int, ProcessPart]) -> None:
        """
        Begin a new record, because all ranks of the job resume training. If ranks hold wrong
        content now, the controller has accepted the content knowingly, or no comparison could find
        it. The new record is then not `clean`, and the content is not checked.
        """
        if self.found is None:
            self._was_found()
        self._frozen, self._pending = None, []
        attempt = (order.incident, order.round)
        clean = not any(_is_wrong(process) for process in members.values())
        self._record = _Record(attempt=attempt, begun=order.step - 1, clean=clean)
        if self.found is not None:
            sound, self.found = self.found.sound, None
            self._sound = sound if order.step - 1 > sound else None

    def freezes(self) -> None:
        """
        Record that the controller has asked the ranks for their positions (order `freeze`).
        """
        self._frozen = self._stage.clock.now if self._frozen is None else self._frozen

    def leads(self) -> None:
        """
        Record that another controller leads from now on.
        """
        self._led = self._stage.clock.now

    def digested(self, process: ProcessPart, step: int) -> None:
        """
        Record the content of a rank at the end of `step`. If the copies of a shard differ in the
        slice of this step, the controller has to find the difference.
        """
        record, stage = self._record, self._stage
        if process.steps.attempt != record.attempt or process.group is None:
            return
        held = record.held.setdefault(step, {})
        held[process.rank] = self._seen(process, step)
        record.members[step] = frozenset(process.group.members)
        if any(content.flipped for content in process.memory.content.values()):
            self._corrupted.add(process.rank)
        for shard, content in process.memory.content.items():
            if content.flipped and len(self._holders(shard, step)) == 1:
                record.clean = False
            copies = self._slice(shard, step)
            if copies is not None and len(set(copies.values())) > 1:
                self._pending.append((record.attempt, stage.clock.now, shard))
                stage.clock.after(FOUND, self._has_found, *self._pending[-1])

    def _seen(self, process: ProcessPart, step: int) -> dict[str, Content]:
        polluted = self._stage.pollution.step
        # after a polluted update all ranks hold the same wrong content, so record equal content
        if polluted is not None and step >= polluted:
            return dict.fromkeys(process.memory.content, self._stage.truth.spoilt(step))
        return dict(process.memory.content)

    def _holders(self, shard: str, step: int) -> list[int]:
        members = self._record.members.get(step, frozenset())
        return [rank for rank in self._stage.schedule.groups()[shard] if rank in members]

    def _copies(self, shard: str, step: int) -> dict[int, Content] | None:
        """
        Return the content of a shard at the end of `step`, by rank. Return None when some holder
        has not ended the step.
        """
        held = self._record.held.get(step, {})
        ranks = self._holders(shard, step)
        if not ranks or any(rank not in held for rank in ranks):
            return None
        return {rank: held[rank][shard] for rank in ranks}

    def _slice(self, shard: str, step: int) -> dict[int, Content] | None:
        """
        Return, by rank, what the slice that is compared in `step` shows of the content of a shard.
        Return None when some holder has not ended the step.
        """
        copies = self._copies(shard, step)
        if copies is None:
            return None
        number, truth = step % self._stage.schedule.slices, self._stage.truth
        return {
            rank: truth.slice_of(content, shard, step, number) for rank, content in copies.items()
        }

    # ---------------------------------------------------------------- copies that differ are found

    def _has_found(self, attempt: Attempt, since: float, shard: str) -> None:
        """
        Check that the machine handles copies that have differed since `since`. Raises `Broken` when
        no incident is open although the controller has received all digests.
        """
        stage = self._stage
        leaders = [leader for leader in stage.cluster.leaders if leader.leads]
        newest = max(leaders, key=lambda leader: leader.epoch, default=None)
        if newest is None or self._record.attempt != attempt or not self._is_heard(since):
            return
        if newest.machine.state in (State.PAUSING, State.PAUSED, State.RESUMING):
            stage.clock.after(FOUND, self._has_found, attempt, since, shard)
        elif newest.machine.state is State.HEALTHY:
            raise Broken(
                "copies that differ must be found",
                f"copies of shard {shard!r} have differed for {stage.clock.now - since:.1f} s, and "
                "the job trains on",
            )

    def _was_found(self) -> None:
        """
        Check that the controller has noticed every slice that differs and whose digests were posted
        before the ranks were asked for their positions. Raises `Broken` otherwise.
        """
        for attempt, since, shard in self._pending:
            asked = self._frozen is not None and since < self._frozen
            if asked and attempt == self._record.attempt and self._is_heard(since):
                raise Broken(
                    "copies that differ must be found",
                    f"copies of shard {shard!r} differed since {since:.3f}, and the ranks resume "
                    "after an incident in which this difference was not reported",
                )

    def _is_heard(self, since: float) -> bool:
        """
        Return True if nothing keeps digests that were posted at `since` from the controller.
        """
        stage = self._stage
        return not (
            stage.over is not None
            or since < self._led
            or stage.schedule.trouble.loss
            or {mishap.what for mishap in stage.mishaps.happened}.intersection(DISTURBING)
        )

    # ---------------------------------------------------------------- verdicts

    def hears(self, machine: Machine, event: Event) -> None:
        """
        Check the result of a comparison of slices that the job machine is about to handle. Raises
        `Broken` when the result does not agree with the real content of the ranks.
        """
        match event:
            case SlicesAgreed():
                self._agreed(event)
            case SlicesDiffered():
                self._differed(machine, event)
            case _:
                pass

    def _agreed(self, event: SlicesAgreed) -> None:
        if event.step <= self._record.begun or self._stage.pollution.step is not None:
            # there is nothing to check: the step is from before the record began, or a polluted
            # update hides whether the copies differed before
            return
        for shard in self._stage.schedule.groups():
            copies = self._copies(shard, event.step)
            if len(self._holders(shard, event.step)) == 1:
                continue
            if copies is None or len(set(copies.values())) > 1:
                raise Broken(
                    "copies that count as compared must be equal",
                    f"the copies of shard {shard!r} at the end of step {event.step} are {copies}",
                )

    def _differed(self, machine: Machine, event: SlicesDiffered) -> None:
        copies = self._slice(event.shard, event.step) or {}
        votes = Counter(copies.values())
        if len(votes) < 2 or sorted(copies) != sorted((*event.right, *event.wrong)):
            raise Broken(
                "copies may be reported as different only if they differ",
                f"the report is {event}, and the copies are {copies}",
            )
        (best, most), (_, next_most), *_ = votes.most_common()
        right = [rank for rank, content in copies.items() if content == best]
        if list(event.right) != (sorted(right) if most > next_most else []):
            raise Broken(
                "the content that most ranks hold must count as right",
                f"the report is {event}, and the copies are {copies}",
            )
        self._is_sound(event, machine.compared)
        if not event.right:
            corrupted = {
                rank
                for rank, held in self._record.held[event.step].items()
                if any(content.flipped for content in held.values())
            }
            self._disputes.append(_Dispute(-1, frozenset(corrupted)))
        # use the step of a periodic checkpoint that has compared whole copies, if that step is
        # later than the last step at which the slice was equal
        sound = machine.compared if event.sound < machine.compared < event.step else event.sound
        self.found = Found(sound, bool(event.right))

    def _is_sound(self, event: SlicesDiffered, compared: int) -> None:
        """
        Check the step that the controller names as the last one at which the slice was equal on all
        ranks (`event.sound`). A controller that has just taken over may name an earlier step: it
        knows only the step `compared`, at which all copies were equal.
        """
        stage, record = self._stage, self._record
        before = event.step - stage.schedule.slices
        copies = self._slice(event.shard, event.sound)
        equal = copies is not None and len(set(copies.values())) == 1
        turn = (event.step - event.sound) % stage.schedule.slices == 0
        if event.sound > max(record.begun, compared) and not (equal and turn):
            raise Broken(
                "copies may count as sound only if they were equal",
                f"the copies at the end of step {event.sound} were not equal, and the report is "
                f"{event}",
            )
        last = self._slice(event.shard, before) if before > record.begun else None
        calm = not stage.schedule.trouble.loss and not {
            mishap.what for mishap in stage.mishaps.happened
        }.intersection((*DISTURBING, "controller"))
        if calm and last is not None and len(set(last.values())) == 1 and event.sound < before:
            raise Broken(
                "the last step at which copies were equal must be known",
                f"the slice was equal at step {before}, and the report is {event}",
            )

    def _traced(self, incident: int, ranks: Sequence[int]) -> None:
        known = [each.corrupted for each in self._disputes if each.incident == incident]
        corrupted = known[-1] if known else frozenset(self._corrupted)
        # do not check a rank if another rank of its model replica has had corrupted content too:
        # that other rank may have caused the wrong gradients because of which this rank was named
        doubtful = {
            rank
            for rank in ranks
            if self._corrupted.intersection(self._stage.schedule.column(rank)) - {rank}
        }
        if not corrupted.issuperset(set(ranks) - doubtful):
            raise Broken(
                "only ranks with wrong copies may be named",
                f"ranks {ranks} were named, but ranks {sorted(corrupted)} had corrupted content",
            )

    # ---------------------------------------------------------------- consequences

    def judged(self, machine: Machine, event: Event) -> None:
        """
        Record the number of the incident that was opened because copies differ without a majority.
        """
        if isinstance(event, SlicesDiffered) and self._disputes:
            last = self._disputes[-1]
            last.incident = machine.incident.number if last.incident < 0 else last.incident

    def tells(self, machine: Machine, told: Tell) -> None:
        """
        Count the incidents in which the copies of a rank were wrong on its node. Raises `Broken`
        when a rank is named whose copies were right.
        """
        facts: Mapping[str, object] = told.facts
        if told.event not in LATE_WORDS:
            return
        traced = told.event == "corruption_traced"
        if not traced and not facts.get("right", True):
            return
        ranks: list[int] = facts["ranks" if traced else "wrong"]  # type: ignore[assignment] # ranks
        incident = int(str(facts["incident"])) if traced else machine.incident.number
        if traced:
            self._traced(incident, ranks)
        for rank in ranks:
            node = self._ledger.place(machine, rank)
            known = self._counts.setdefault((rank, node), set())
            known.add(incident)
            if len(known) > 1:
                self.left.add(node)

    def goes_back(self, machine: Machine, step: int, earlier: int | None) -> None:
        """
        Check the step to which all ranks go back after copies differed. `earlier` is a step from
        before the difference that all ranks could go back to. Raises `Broken` when another step was
        chosen, or when the policy forbids the step.
        """
        found, corruption = self.found, self._stage.schedule.policy.corruption
        if found is None or step <= found.sound:
            return
        if earlier is not None:
            raise Broken(
                "all ranks must return to a copy from before the difference",
                f"step {step} was chosen, although copies were equal at step {found.sound} last and "
                f"a copy of step {earlier} exists",
            )
        if corruption == "end" or (corruption == "majority" and not found.decided):
            raise Broken(
                "a copy of unknown correctness must not be used",
                f"step {step} was chosen, copies were equal at step {found.sound} last, and the "
                f"policy is {corruption!r}",
            )

    def closed(self, machine: Machine) -> None:
        """
        Check the report of an incident that ends. If the job goes on from a step after copies had
        begun to differ, the report must say that the state may be wrong. Raises `Broken` otherwise.
        """
        sound, step = self._sound, machine.incident.progress.agreed
        self._sound = None
        if sound is None or step <= sound:
            return
        if not any("may be wrong" in told for told in machine.incident.exactness.sentences):
            raise Broken(
                "an inexact recovery must be reported",
                f"training resumed from step {step}, copies were equal at step {sound} last, and "
                "the report calls the incident exact",
            )

    def completes(self, members: Mapping[int, ProcessPart], *, compared: bool) -> None:
        """
        Check that a job that compares slices completes with equal copies. `compared` is True if the
        ranks reported digests after all of them had finished. Raises `Broken` otherwise.
        """
        if not self._stage.schedule.slices:
            return
        for shard in self._stage.schedule.groups():
            copies = {
                rank: process.memory.content[shard]
                for rank, process in members.items()
                # leave out ranks that were corrupted after all ranks had reported their digests
                if shard in process.memory.content and not (compared and process.memory.unsaid)
            }
            if len(set(copies.values())) > 1:
                raise Broken(
                    "a job may complete only with equal copies",
                    f"the copies of shard {shard!r} are {copies}",
                )

    def goes_on(self, machine: Machine, members: Mapping[int, ProcessPart], step: int) -> None:
        """
        Check the content from which the members go on after copies differed. If the job has gone
        back to a step before the difference, no member may hold corrupted content. Raises `Broken`
        otherwise.
        """
        found = self.found
        if found is None or step > found.sound or not self._record.clean:
            return
        for rank, process in members.items():
            if process.memory.unsaid:
                # skip a rank that was corrupted after it had reported its digests: a later
                # comparison of slices finds the corruption
                continue
            for shard, content in process.memory.content.items():
                if content.flipped or content.spread:
                    raise Broken(
                        "after copies differed, all ranks must continue with right content",
                        f"rank {rank} goes on from the end of step {step} with {content} as shard "
                        f"{shard!r}; copies were equal at step {found.sound}",
                    )
