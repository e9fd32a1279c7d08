"""
Compare the copies of shards while the job trains. In each step every rank digests one slice of its
shards, and the beats bring the digests. So every byte is compared once in as many steps as there
are slices. The code is pure, like the hang detection; only its verdicts become events of the job
machine.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered, SliceVerdict
from tft.core.plan.topology import Replicas
from tft.protocol.messages import Beat, SliceDigest

CONTRIBUTION = -1
"""Stands in `SliceDigest.number` for the digest of what a rank contributed to the gradients."""
WAITING = 16
"""The number of complete steps behind an incomplete one, at least. After that, the digests that are
missing were lost with their beats: the comparison goes on with the steps that are complete."""

KEPT = 1000
"""The number of steps of which digests are kept at most, while digests of other ranks are
missing."""

Attempt = tuple[int, int]
"""The incident and the round after which the ranks train. Digests of another attempt are late."""


@dataclass(slots=True, kw_only=True)
class _Steps:
    """
    The steps in which all slices were equal on all ranks.
    """

    last: int
    """All slices of this step were equal. In the beginning: the whole state was compared."""
    run: int = 0
    """The number of such steps, up to `last`, without a gap."""
    ahead: set[int] = field(default_factory=set)
    """Later steps of this kind, behind a gap."""

    def add(self, step: int) -> None:
        """
        Add a step in which all slices were equal.
        """
        if step <= self.last:
            return
        self.ahead.add(step)
        if len(self.ahead) > WAITING:  # the digests of the step before are lost
            self.last, self.run = min(self.ahead) - 1, 0
        while self.last + 1 in self.ahead:
            self.last += 1
            self.run += 1
            self.ahead.discard(self.last)


@dataclass(slots=True, kw_only=True)
class _Dispute:
    """
    Copies of one shard that differed without a majority, and what their holders had contributed.

    A wrong copy shows first in the gradients of its holder, and one step later in those of all
    ranks. So the rank whose contribution is the first to differ when the steps are computed again
    had the wrong copy. If no gradient has shown it, the wrong numbers have not spread: then the
    slice itself, computed again, is equal to that of the rank with the right copy.
    """

    incident: int | None = None
    """The number of the incident that followed. None: not known yet."""
    holders: tuple[int, ...]
    before: Mapping[int, Mapping[int, int]]
    """By step after the last one at which the copies were equal, and by rank: the digest."""
    slice: tuple[str, int, int]
    """The shard, the number of the slice, and the step at which the copies differed."""
    copies: Mapping[int, int]
    """By rank: the digest of this slice."""


class SliceComparison:
    """
    Compares the slices of one job. The controller passes every beat to it, and feeds the verdicts to
    the machine, one after another, until the ranks train again after an incident.
    """

    def __init__(self) -> None:
        self._attempt: Attempt | None = None
        self._replicas = Replicas(groups={}, names={})
        self._begun = 0
        self._steps = _Steps(last=0)
        self._slices = 0
        self._said = 0
        """The newest step of a `SlicesAgreed`."""
        self._kept = 0
        """The newest step of which a rank keeps a copy that may be used once it is compared."""
        self._differ = False
        self._verdicts: deque[SliceVerdict] = deque()
        self._waiting: dict[int, dict[str, dict[int, int]]] = {}
        """By step, shard and rank: digests of slices that are not compared yet."""
        self._agreed: dict[tuple[int, str], int] = {}
        """By slice and shard: the last step at which all copies of the slice were equal."""
        self._contributed: dict[int, dict[int, int]] = {}
        """By step and rank: the digest of what the rank contributed."""
        self._dispute: _Dispute | None = None

    @property
    def compared(self) -> int:
        """
        The newest step at whose end all copies are known to have been equal: every slice was
        compared at that step or a later one.
        """
        if not self._slices or self._steps.run < self._slices:
            return self._begun
        return self._steps.last - self._slices + 1

    def resumed(self, attempt: Attempt, step: int, replicas: Replicas) -> None:
        """
        Begin again: the members of `replicas` continue from the end of `step`, where all copies
        were compared.
        """
        if attempt == self._attempt:
            return
        if self._dispute is not None and self._dispute.incident is None:
            self._dispute.incident = attempt[0]
        elif self._dispute is not None and self._dispute.incident != attempt[0]:
            # after another incident, gradients may come out otherwise for another reason
            self._dispute = None
        self._attempt, self._replicas, self._begun = attempt, replicas, step
        self._steps = _Steps(last=step)
        self._said, self._kept, self._differ = step, 0, False
        self._verdicts.clear()
        self._waiting, self._agreed, self._contributed = {}, {}, {}

    def heard(self, beat: Beat) -> None:
        """
        Take the digests of a beat.
        """
        for pulse in beat.pulses:
            for digest in pulse.digests:
                if (digest.incident, digest.round) == self._attempt and not self._differ:
                    self._take(pulse.rank, digest)
                    self._kept = max(self._kept, pulse.kept)
        self._tell()

    def verdict(self, at: float, *, calm: bool) -> SliceVerdict | None:
        """
        Return the oldest verdict that was not returned yet, stamped with the time `at`. None: there
        is none. If the job is not `calm`, because an incident or a pause is under way, return only
        that copies differ: nothing else matters then.
        """
        found = self._verdicts
        if not found or not (calm or isinstance(found[-1], SlicesDiffered)):
            return None
        return replace(found.popleft() if calm else found.pop(), at=at)

    def _tell(self) -> None:
        """
        Tell the newest compared step once for every cycle through the slices, and as soon as the
        newest kept copy is compared: each time is a line in the story.
        """
        compared = self.compared
        if self._differ or compared <= self._said:
            return
        if compared >= self._said + self._slices or self._said < self._kept <= compared:
            self._said = compared
            self._verdicts.append(SlicesAgreed(at=0.0, step=compared))

    # ---------------------------------------------------------------- one digest

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
        if len(self._waiting) > KEPT:  # a rank that reports no digests must not fill the memory
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

    def _complete(self, step: int) -> None:
        """
        Count a step if all its slices are compared, and drop what is not needed any more.
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
        right = tuple(rank for rank in sorted(copies) if known and copies[rank] == best)
        if not known:
            self._dispute = _Dispute(
                holders=tuple(sorted(copies)),
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

    # ---------------------------------------------------------------- two copies that differed

    def _trace(self) -> None:
        """
        Name the rank that had the wrong copy, once the steps of a dispute are computed again and
        the gradients of a rank are the first to come out otherwise.
        """
        dispute = self._dispute
        if dispute is None or dispute.incident is None:
            return
        for step in sorted(self._contributed):
            now, before = self._contributed[step], dispute.before.get(step, {})
            if step > dispute.slice[2]:
                return  # the gradients did not show it
            if any(rank in before and rank not in now for rank in dispute.holders):
                return  # this rank has not reported the step yet
            changed = tuple(
                rank for rank in dispute.holders if rank in before and now[rank] != before[rank]
            )
            if changed:
                complete = all(rank in before for rank in dispute.holders)
                return self._settle(dispute, changed if complete else (), step)

    def _trace_slice(self, where: tuple[str, int, int], digest: int) -> None:
        """
        Name the rank whose slice was another one than that which is computed again.
        """
        dispute = self._dispute
        if dispute is not None and dispute.incident is not None and dispute.slice == where:
            changed = tuple(rank for rank in dispute.holders if dispute.copies[rank] != digest)
            self._settle(dispute, changed, where[2])

    def _settle(self, dispute: _Dispute, wrong: tuple[int, ...], step: int) -> None:
        """
        End a dispute. If not all holders computed otherwise, these ranks had the wrong copy. `step`
        is the first step that shows it.
        """
        self._dispute = None
        if wrong and wrong != dispute.holders and dispute.incident is not None:
            self._verdicts.append(
                CorruptionTraced(at=0.0, incident=dispute.incident, ranks=wrong, step=step - 1)
            )
