"""
Compare the copies of shards while the job trains. In each step every rank digests one slice of
each of its shards. So with N slices, every byte is compared once in N steps. The heartbeats of the
nodes (`Beat`) carry the digests to the controller, where this code compares the digests.

The code is pure. Only its verdicts become events of the job machine (the state machine that makes
the decisions of the controller).
"""

from collections import Counter, deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered, SliceVerdict
from tft.core.plan.topology import Replicas
from tft.protocol.messages import Beat, SliceDigest

CONTRIBUTION = -1
"""The value of `SliceDigest.number` that marks a digest of the rank's own contribution to the
gradients, not of a slice."""
WAITING = 16
"""The number of later steps that may be compared while the digests of an earlier step are missing.
If there are more, the earlier step is given up, because the heartbeats with its digests were lost.
The comparison then continues with the later steps."""

KEPT = 1000
"""The maximum number of steps whose digests are kept while the digests of other ranks for these
steps are missing."""

Attempt = tuple[int, int]
"""The incident and the round in which the ranks were last ordered to resume training. Digests from
another incident or round are out of date."""


@dataclass(slots=True, kw_only=True)
class _Steps:
    """
    The steps whose slices were found equal on all ranks that hold the slices.
    """

    last: int
    """The newest step such that this step and all steps before it were compared or given up. At
    first it is the step from whose end the ranks resumed, where whole copies were compared."""
    run: int = 0
    """The number of consecutive steps with equal slices that end with the step `last`. A step that
    was given up breaks the sequence."""
    ahead: set[int] = field(default_factory=set)
    """The steps after `last` whose slices were equal too. These steps wait here, because digests of
    the step `last` + 1 are still missing."""

    def add(self, step: int) -> None:
        """
        Add a step in which the slices of all shards were equal on all ranks.
        """
        if step <= self.last:
            return
        self.ahead.add(step)
        if len(self.ahead) > WAITING:  # the digests of step `last` + 1 were lost: skip that step
            self.last, self.run = min(self.ahead) - 1, 0
        while self.last + 1 in self.ahead:
            self.last += 1
            self.run += 1
            self.ahead.discard(self.last)


@dataclass(slots=True, kw_only=True)
class _Dispute:
    """
    A case in which copies of one shard differed and no majority shows which copy is wrong. This
    object keeps digests from before the incident. They can show the wrong copy when the ranks
    compute the same steps again.

    A wrong copy first changes the gradients of the ranks that compute with it: its holder and the
    other ranks of the holder's model replica. One step later it changes the gradients of all ranks.
    After the incident, the ranks compute these steps again from a sound state, and the new
    gradients are compared with the earlier ones. In the first step in which gradients differ, they
    differ only in the model replica of the wrong copy. So the holder in that replica is found.

    If no gradients differ, the wrong numbers have not spread. Then the slice that is computed again
    equals the slice of the right copy.
    """

    incident: int | None = None
    """The number of the incident that the difference caused. None: not known yet."""
    holders: tuple[int, ...]
    users: Mapping[int, set[int]]
    """By holder of a copy: the ranks that compute with this copy and report digests of their
    gradients. These are the holder itself and ranks of its model replica."""
    before: dict[int, dict[int, int]]
    """By step and rank: the digest of the gradients that the rank contributed to this step before
    the incident. The first of these steps follows the last step at which all copies were equal."""
    slice: tuple[str, int, int]
    """The shard, the number of the slice, and the step at which the copies differed."""
    copies: Mapping[int, int]
    """Maps each rank to the digest of its copy of the slice that `slice` names. These digests have
    shown that the copies differ."""


class SliceComparison:
    """
    Compares the slices of one job. The controller passes every heartbeat to this object. Then the
    controller fetches the verdicts (`verdict`) one after another and passes them to the job
    machine. When the ranks resume after an incident, verdicts that were not fetched are dropped.
    """

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._replicas = Replicas(groups={}, names={})
        self._begun = 0
        self._steps = _Steps(last=0)
        self._slices = 0
        self._said = 0
        """The step of the newest `SlicesAgreed` verdict, which says that all copies were equal at a
        step."""
        self._kept = 0
        """The newest step of which some rank keeps a copy in host memory. An incident may use such
        a copy once all slices were compared at that step or at later steps."""
        self._differ = False
        self._verdicts: deque[SliceVerdict] = deque()
        self._waiting: dict[int, dict[str, dict[int, int]]] = {}
        """By step, shard and rank: the digests that have arrived for steps that cannot be compared
        completely yet."""
        self._agreed: dict[tuple[int, str], int] = {}
        """By slice and shard: the last step at which all copies of the slice were equal."""
        self._contributed: dict[int, dict[int, int]] = {}
        """By step and rank: the digest of the gradients that the rank contributed to the step."""
        self._dispute: _Dispute | None = None

    @property
    def compared(self) -> int:
        """
        The newest step at whose end all copies are known to have been equal, because every slice
        was compared at that step or a later one.
        """
        if not self._slices or self._steps.run < self._slices:
            return self._begun
        return self._steps.last - self._slices + 1

    def resumed(self, attempt: Attempt, step: int, replicas: Replicas) -> None:
        """
        Restart the comparison, because the ranks of the job continue from the end of `step`, where
        all copies were compared. `replicas` says which of these ranks hold which shard. A second
        call with the same `attempt` (incident and round) does nothing.
        """
        if attempt == self._attempt:
            return
        if self._dispute is not None and self._dispute.incident is None:
            self._dispute.incident = attempt[0]
        elif self._dispute is not None and self._dispute.incident != attempt[0]:
            # after a further incident, gradients may differ from before for another reason, so
            # gradients no longer show which copy was wrong
            self._dispute = None
        self._attempt, self._replicas, self._begun = attempt, replicas, step
        self._steps = _Steps(last=step)
        self._said, self._kept, self._differ = step, 0, False
        self._verdicts.clear()
        self._waiting, self._agreed, self._contributed = {}, {}, {}

    def heard(self, beat: Beat) -> None:
        """
        Record and compare the digests in a heartbeat.
        """
        for pulse in beat.pulses:
            for digest in pulse.digests:
                if (digest.incident, digest.round) != self._attempt:
                    continue
                if self._differ:
                    self._take_late(pulse.rank, digest)
                else:
                    self._take(pulse.rank, digest)
                    self._kept = max(self._kept, pulse.kept)
        self._tell()

    def verdict(self, at: float, *, calm: bool) -> SliceVerdict | None:
        """
        Return the oldest verdict that was not returned yet, with the time `at`. Return None if
        there is no such verdict.

        Pass `calm=False` while an incident or a pause is under way. Then only a verdict that copies
        differ is returned, because the job machine ignores other verdicts at that time.
        """
        found = self._verdicts
        if not found or not (calm or isinstance(found[-1], SlicesDiffered)):
            return None
        return replace(found.popleft() if calm else found.pop(), at=at)

    def _tell(self) -> None:
        """
        Add a `SlicesAgreed` verdict once for every cycle through all slices, and also as soon as
        the step of the newest copy in host memory is compared. The verdict is not added in every
        step, because each verdict becomes a line in the story (the recorded events of the job).
        """
        compared = self.compared
        if self._differ or compared <= self._said:
            return
        if compared >= self._said + self._slices or self._said < self._kept <= compared:
            self._said = compared
            self._verdicts.append(SlicesAgreed(at=0.0, step=compared))

    # ---------------------------------------------------------------- the digests of one slice

    def _take(self, rank: int, digest: SliceDigest) -> None:
        if digest.step <= self.compared:
            return
        if digest.number == CONTRIBUTION:
            self._contributed.setdefault(digest.step, {})[rank] = digest.digest
            self._trace()
            return
        names = self._replicas.names.get(rank, ())
        shard = names[digest.shard] if 0 <= digest.shard < len(names) else ""
        holders = self._replicas.groups.get(shard, ())
        if rank not in holders or digest.step <= self._agreed.get((digest.number, shard), 0):
            return
        self._slices = digest.of
        copies = self._waiting.setdefault(digest.step, {}).setdefault(shard, {})
        copies[rank] = digest.digest
        # drop the digests of the oldest step, because a rank that sends no digests would make
        # `_waiting` grow without limit
        if len(self._waiting) > KEPT:
            del self._waiting[min(self._waiting)]
        if len(copies) < len(holders):
            return
        if len(set(copies.values())) > 1:
            self._differ = True
            self._verdicts.append(self._differed(shard, digest, copies))
            return
        self._agreed[digest.number, shard] = digest.step
        self._trace_slice((shard, digest.number, digest.step), digest.digest)
        self._complete(digest.step)

    def _take_late(self, rank: int, digest: SliceDigest) -> None:
        """
        Record a digest that has arrived after copies were found to differ. Only digests of
        gradients matter then, because these digests can show which copy was wrong.
        """
        dispute = self._dispute
        if digest.number == CONTRIBUTION and dispute is not None and dispute.incident is None:
            dispute.before.setdefault(digest.step, {})[rank] = digest.digest
            for holder, users in dispute.users.items():
                if rank in self._replicas.columns.get(holder, ()):
                    users.add(rank)

    def _complete(self, step: int) -> None:
        """
        Record a step as compared if the slices of all shards were compared in this step. Then drop
        the digests of all steps that are compared, because they are not needed any more.
        """
        copies = self._waiting[step]
        if any(len(copies.get(s, ())) < len(ranks) for s, ranks in self._replicas.groups.items()):
            return
        self._steps.add(step)
        for old in [each for each in self._waiting if each <= self._steps.last]:
            del self._waiting[old]
        compared = self.compared
        for old in [each for each in self._contributed if each <= compared]:
            del self._contributed[old]

    def _differed(
        self, shard: str, digest: SliceDigest, copies: Mapping[int, int]
    ) -> SlicesDiffered:
        (best, most), *others = Counter(copies.values()).most_common()
        known = most > others[0][1]
        tell = {rank for each in self._contributed.values() for rank in each}
        right = tuple(rank for rank in sorted(copies) if known and copies[rank] == best)
        if not known:
            self._dispute = _Dispute(
                holders=tuple(sorted(copies)),
                users={
                    rank: {rank, *tell.intersection(self._replicas.columns.get(rank, ()))}
                    for rank in copies
                },
                before={step: dict(each) for step, each in self._contributed.items()},
                slice=(shard, digest.number, digest.step),
                copies=dict(copies),
            )
        return SlicesDiffered(
            at=0.0,
            shard=shard,
            step=digest.step,
            right=right,
            wrong=tuple(rank for rank in sorted(copies) if rank not in right),
            sound=self._agreed.get((digest.number, shard), self._begun),
        )

    # ---------------------------------------------------------------- finding the wrong copy

    def _trace(self) -> None:
        """
        End the dispute (copies that differed without a majority) when the ranks compute the steps
        again and some gradients come out different from before. In the first step with such
        gradients, the holders in the model replicas that these gradients come from had the wrong
        copy.
        """
        dispute = self._dispute
        if dispute is None or dispute.incident is None:
            return
        for step in sorted(self._contributed):
            now, before = self._contributed[step], dispute.before.get(step, {})
            if step > dispute.slice[2]:
                return  # all gradients came out as before, so they do not show the wrong copy
            if not before.keys() <= now.keys():
                return  # wait, because a rank has not reported the repeated step yet
            differ = {rank for rank in before if now[rank] != before[rank]}
            if differ:
                return self._settle(dispute, self._shown(dispute, differ, before.keys()), step)

    def _shown(self, dispute: _Dispute, differ: Set[int], reported: Set[int]) -> tuple[int, ...]:
        """
        Return the holders that had a wrong copy, if the ranks in `differ` are the first whose
        gradients come out different. `reported` has the ranks whose gradients can be compared.

        Return no holder if gradients differ on a rank that computes with neither copy. The
        difference on this rank has another cause, such as a second wrong copy. The gradients of the
        other ranks may then differ for the same cause.

        A rank with a whole model that does not hold the shard computes with what one of the holders
        has updated, and it is not known with which. So it counts as a user of each holder.
        """
        shown = tuple(rank for rank in dispute.holders if dispute.users[rank] & differ)
        users = set().union(*(dispute.users[rank] for rank in shown))
        users |= differ - set(dispute.holders) - self._replicas.columns.keys()
        complete = set().union(*dispute.users.values()) <= reported
        return shown if complete and differ <= users else ()

    def _trace_slice(self, where: tuple[str, int, int], digest: int) -> None:
        """
        End the dispute (copies that differed without a majority) when the disputed slice is
        computed again. The ranks whose earlier slice differs from the new slice had the wrong copy.
        `where` names the shard, the slice and the step that `digest` belongs to.
        """
        dispute = self._dispute
        if dispute is not None and dispute.incident is not None and dispute.slice == where:
            changed = tuple(rank for rank in dispute.holders if dispute.copies[rank] != digest)
            self._settle(dispute, changed, where[2])

    def _settle(self, dispute: _Dispute, wrong: tuple[int, ...], step: int) -> None:
        """
        End the dispute (copies that differed without a majority), and add a verdict that names the
        ranks in `wrong`. Add no verdict if `wrong` is empty or names all holders, because then the
        digests do not tell wrong copies from right ones. `step` is the first step whose numbers
        came out different.
        """
        self._dispute = None
        if wrong and wrong != dispute.holders and dispute.incident is not None:
            self._verdicts.append(
                CorruptionTraced(at=0.0, incident=dispute.incident, ranks=wrong, step=step - 1)
            )
