"""
Compares the copies that several ranks hold of the same shard, by the digests of the copies. If
copies differ, the job trains with wrong numbers, and no other check in tft would notice that.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tft.core.job.attempts import Attempts
from tft.core.job.rank_state import RankState
from tft.core.job.state import Job
from tft.core.plan.coverage import sound
from tft.core.plan.standing import Standings
from tft.protocol.messages import UNSLICED

Parts = Mapping[str, str]
"""By name of a part of a shard (such as a parameter): the digest of the part. An empty digest marks
a part that differs from rank to rank by design, so this part is not compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """
    The digests of all shards that one rank holds, and the facts that decide how these digests are
    compared with the digests of other ranks.
    """

    rank: int
    step: int
    """The step at whose end the rank had the state that was digested."""
    shards: Mapping[str, Parts]
    tail: bool = False
    """True if the rank left its loop in the tail of `step` (the code between the update and the end
    of the step). Then a part of the tail was perhaps not run."""
    line: str = ""
    """The line of code (FILE:LINE) in the tail of the step at which the rank left its loop. Empty:
    the line is not known, or the rank did not leave its loop in a tail."""
    brought: bool = False
    """True if the rank fetched its copies from other ranks in this incident. A fetched copy repeats
    the copy of its source and does not prove that the source is right. So fetched copies do not
    count when the majority is looked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """
    A difference between the copies of one shard at one step.
    """

    shard: str
    step: int
    right: tuple[int, ...]
    """The ranks whose copies are right. Empty: it is not known which copies are right."""
    wrong: tuple[int, ...]
    """The ranks whose copies differ from the right copies. If `right` is empty: all ranks that hold
    different copies."""
    parts: tuple[str, ...]
    """The names of the parts of the shard that differ."""
    tail: bool
    """True if all ranks in `right` and `wrong` left their loops in the tail of the step (the code
    between the update and the end of the step). Then the copies differ because some ranks had run
    more of that code than others, and not because a copy is wrong."""

    @property
    def unsliced(self) -> bool:
        """
        True if at least one of the differing parts is never compared by the slice comparison, such
        as a buffer of a module. The slice comparison digests a small slice of the copies in each
        step.
        """
        return any(part.startswith(UNSLICED) for part in self.parts)

    def sentence(self) -> str:
        """
        Return a sentence for an operator that says which ranks hold different copies of which
        shard.
        """
        what = f"{', '.join(self.parts)} of shard {self.shard!r} at the end of step {self.step}"
        if not self.right:
            return f"ranks {list(self.wrong)} hold different copies of {what}"
        return f"ranks {list(self.wrong)} hold another copy of {what} than ranks {list(self.right)}"


def differences(
    groups: Mapping[str, Sequence[int]], copies: Mapping[int, Copy]
) -> list[Difference]:
    """
    Return the differences between copies of the same shard at the same step. `groups` maps each
    shard to the ranks that hold it, `copies` maps each rank to the digests of its copies. Some
    holders of a shard may have left their loops in the tail of the step. Their copies are not
    compared if another holder has ended the step, because its copy will replace them anyway.
    """
    found = []
    for shard, ranks in groups.items():
        by_step: dict[int, list[Copy]] = {}
        for rank in ranks:
            if rank in copies and shard in copies[rank].shards:
                by_step.setdefault(copies[rank].step, []).append(copies[rank])
        for step, ones in sorted(by_step.items()):
            ended = [copy for copy in ones if not copy.tail]
            difference = _difference(shard, step, ended or ones, tail=not ended)
            if difference is not None:
                found.append(difference)
    return found


def _difference(shard: str, step: int, copies: list[Copy], *, tail: bool) -> Difference | None:
    parts = {copy.rank: copy.shards[shard] for copy in copies}
    own = {name for each in parts.values() for name, digest in each.items() if not digest}
    alike = {
        rank: frozenset((name, digest) for name, digest in each.items() if name not in own)
        for rank, each in parts.items()
    }
    if len(set(alike.values())) < 2:
        return None
    chosen = _chosen(copies, alike)
    if chosen is None and tail:
        chosen = alike[max(copies, key=_progress).rank]
    right = tuple(rank for rank in alike if alike[rank] == chosen)
    common = frozenset.intersection(*alike.values())
    return Difference(
        shard=shard,
        step=step,
        right=right,
        wrong=tuple(rank for rank in alike if rank not in right),
        parts=tuple(sorted({name for each in alike.values() for name, _ in each - common})),
        tail=tail,
    )


def _chosen(
    copies: Iterable[Copy], alike: Mapping[int, frozenset[tuple[str, str]]]
) -> frozenset[tuple[str, str]] | None:
    """
    Return the content (the digests of a shard) that more copies have than any other content. Each
    copy has one vote, but copies that were fetched from other ranks have none. Return None if no
    copy has a vote, or if several contents share the highest number of votes.
    """
    votes = Counter(alike[copy.rank] for copy in copies if not copy.brought)
    if not votes:
        return None
    (best, most), *others = votes.most_common()
    if not others:
        return best
    return best if most > others[0][1] else None


def _progress(copy: Copy) -> tuple[int, int]:
    """
    Return a sort key that says how far a rank came in the tail of a step (the code after the
    update). The key is the number of the line at which the rank left the loop. Of two ranks at the
    same line, the rank with the lower number has the higher key.
    """
    line = copy.line.rpartition(":")[2]
    return (int(line) if line.isdecimal() else 0, -copy.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """
    A difference between the copies of a shard that was found while the ranks trained, or after they
    had finished training.
    """

    at: float
    step: int
    """The step at whose end the copies were found to differ."""
    equal: int
    """The last step at whose end the copies were found equal."""
    wrong: tuple[int, ...]
    decided: bool
    """True if a majority shows that the copies of the ranks in `wrong` are wrong. False: `wrong`
    has all ranks that hold different copies, and it is not known which copy is right."""
    shard: str = ""
    """The name of the shard whose copies differ. Empty: the shard is not known."""
    sentence: str
    """A sentence for an operator that says which ranks hold different copies of which shard."""

    @classmethod
    def of(cls, difference: Difference, *, equal: int, at: float) -> "Seen":
        """
        Return the `Seen` object for a difference that was found at the time `at`. `equal` is the
        last step at whose end the copies were found equal.
        """
        return cls(
            at=at,
            step=difference.step,
            equal=equal,
            wrong=difference.wrong,
            decided=bool(difference.right),
            shard=difference.shard,
            sentence=difference.sentence(),
        )


class Comparison:
    """
    Compares the copies of the shards of one job, and decides which ranks hold wrong copies.
    """

    def __init__(self, job: Job, attempts: Attempts) -> None:
        self._job = job
        self._attempts = attempts

    def will_hold(self, ranks: Iterable[int], step: int) -> tuple[int, ...]:
        """
        Return those of `ranks` that are to digest their copies as soon as they have left their
        loops at the end of `step`. This is a forecast of what the method `holders` will return when
        all ranks have left their loops. If `holders` then returns further ranks, the caller must
        order these ranks to digest their copies, too.
        """
        job, shared = self._job, self._in_several_copies()
        ceiling = job.incident.spread.ceiling
        if (job.training.untrained and not step) or (ceiling is not None and step > ceiling):
            return ()
        return tuple(
            rank
            for rank in ranks
            if rank in shared and _may_be_right(job.ranks.states[rank], doubted=True)
        )

    def _in_several_copies(self) -> set[int]:
        """
        Return the ranks that hold a shard of which there are several holders, alive or lost.
        """
        groups = self._job.ranks.topology().groups.values()
        return {rank for ranks in groups for rank in ranks if len(ranks) > 1}

    def holders(self) -> tuple[int, ...]:
        """
        Return the ranks that must digest their copies: the members (the ranks that take part in
        training) with a copy of a shard that has several holders. Ranks whose copies may be wrong
        are included, because the method `StrategyChoice.offers` may accept these copies later. If
        only one holder of such a shard is left, that holder is included too: its copy is later
        compared with the copies that other ranks fetch from it.
        """
        shared = self._in_several_copies()
        return tuple(sorted(shared & {each.rank for each in self._sound(doubted=True)}))

    def sharing(self) -> tuple[int, ...]:
        """
        Return the members (the ranks that take part in training) that hold a shard of which another
        member also holds a copy.
        """
        return tuple(sorted(set().union(*self._job.ranks.shared().values())))

    def at_the_end(self) -> list[Seen]:
        """
        Compare the copies of the shards when all ranks of the job have finished training. Return
        the differences.
        """
        found = self._found(tails=False)
        for each in found:
            self._tell(each)
        now = self._job.timing.now
        return [Seen.of(each, equal=self._equal(each), at=now) for each in found]

    def differ(self, seen: Seen) -> None:
        """
        Add a `corruption` fault to the open incident, because the copies of a shard differ. If no
        incident is open, open one. A wrong copy spreads to all ranks with the gradients that are
        computed from it. So record that the states of all ranks may be wrong since the last step at
        which these copies were equal. This cannot wait until all ranks have left their loops: by
        then the wrong part may be overwritten, or the rank that holds it may be lost.
        """
        job, since = self._job, f"they were equal at the end of step {seen.equal}"
        for rank in seen.wrong if seen.decided else (None,):
            self._attempts.fault(
                "corruption", rank, seen.step + 1, seen.at, f"{seen.sentence}; {since}"
            )
            if rank is not None and seen.shard:
                job.ranks.states[rank].holdings.distrust()
        incident = job.incident
        spread = incident.spread
        spread.equals.add((seen.shard, seen.equal))
        spread.undecided = spread.undecided or not seen.decided
        if not seen.shard:
            spread.suspects |= set(seen.wrong)
        gone = (
            f"{seen.sentence}, and all ranks went on from later state than that of step "
            f"{seen.equal}: the state of all ranks may be wrong since step {seen.equal + 1}"
        )
        incident.exactness.reservations.append((seen.equal + 1, gone))
        self.blame(seen.wrong if seen.decided else ())

    def doubt(self) -> str:
        """
        Return a sentence that says which copies were not compared when all ranks had finished
        training, and why. Return an empty text if all copies were compared.
        """
        unread = self.unread()
        if unread:
            return not_compared(unread)
        states = self._job.ranks.states
        ends = uneven({rank: states[rank].holdings.held or 0 for rank in self.sharing()})
        return f"copies were not compared, because {ends}" if ends else ""

    def unread(self) -> list[int]:
        """
        Return the ranks whose copies were not compared, because the ranks could not read their
        copies. Only members whose shards other members hold too are returned.
        """
        states = self._job.ranks.states
        return [rank for rank in self.sharing() if states[rank].holdings.digests == {}]

    def judge(self) -> None:
        """
        Compare the copies of the shards when every rank has left its loop and has sent the digests
        of its copies. A rank whose copy differs from the copy of the majority is at fault, and will
        fetch the copy of the majority. If there is no majority, only copies up to the last step at
        which copies were found equal are used, unless `policy.corruption` is `continue`.
        """
        for rank_state in self._job.ranks.states.values():
            # an earlier comparison may have preferred copies of other ranks to the copies of this
            # rank. Let the copies of this rank count again, because the other ranks may be lost now
            rank_state.holdings.outrun, rank_state.holdings.passed_over = frozenset(), {}
        self._distrust_suspects()
        found = self._found()
        self._judge(found)
        self._limit([each for each in found if not each.tail])

    def _distrust_suspects(self) -> None:
        """
        Stop trusting ranks whose copies were wrong at a periodic checkpoint, if no other rank with
        the same shard is left to compare the copies with.
        """
        suspects, groups = self._job.incident.spread.suspects, self._job.ranks.topology().groups
        sound = {rank_state.rank for rank_state in self._sound()}
        for rank in suspects & sound:
            shared = [set(ranks) for ranks in groups.values() if rank in ranks and len(ranks) > 1]
            if not any(ranks & sound - suspects for ranks in shared):
                self._job.ranks.states[rank].holdings.distrust()

    def _limit(self, found: list[Difference]) -> None:
        """
        Set a limit to the step that all ranks return to: the last step at which the copies that
        differ now were found equal. Wrong numbers may have spread with the gradients since then.

        If a majority shows which copies are right, or if `policy.corruption` is `continue`, the
        limit is only a precaution: it is dropped if all copies that are left are of later steps. A
        job that does not compare slices in every step sets no limit if a majority shows the right
        copy. In such a job the last comparison may be long ago, so the limit would undo many steps.
        """
        job, spread = self._job, self._job.incident.spread
        equal = [self._equal(each) for each in found if job.training.sliced]
        equal += [step for _, step in spread.equals]
        if not equal:
            return
        sound = min(equal)
        undecided = spread.undecided and job.policy.corruption != "continue"
        if not job.training.sliced:
            if undecided and not found:
                # copies differed at a periodic checkpoint and are equal now. This proves nothing:
                # the wrong part may have been overwritten after its numbers had spread
                spread.lower(sound)
        elif undecided or job.policy.corruption == "end":
            spread.lower(sound)
        else:
            spread.prefer(sound)

    def _equal(self, difference: Difference) -> int:
        """
        Return the last step at which the copies in `difference` are known to have been equal. If
        copies of the same shard were already found to differ while the ranks trained, use the step
        that was recorded then. Otherwise use the last step at which all copies were found equal.
        """
        spread, training = self._job.incident.spread, self._job.training
        known = training.equal.whole if difference.unsliced else training.equal.compared
        seen = [step for shard, step in spread.equals if shard == difference.shard]
        return min(seen, default=known)

    def blame(self, ranks: Iterable[int], incident: int = 0) -> None:
        """
        Record that each of these ranks had wrong copies in one incident, on the node where the rank
        is now. `incident` is the number of that incident, or 0 for the present incident. If a rank
        has now had wrong copies on the same node in two incidents, try to give up that node.
        """
        job = self._job
        for rank in ranks:
            rank_state = job.ranks.states[rank]
            known = job.history.corruptions.setdefault((rank, rank_state.node), set())
            known.add(incident or job.incident.number)
            if len(known) > 1:
                self._leave(rank_state, len(known))

    def _leave(self, rank_state: RankState, times: int) -> None:
        """
        Give up the node of a rank that has had wrong copies in `times` incidents, because its
        memory is probably defective. Do so only if other nodes have room for all ranks of this node
        and hold copies of all shards of these ranks. Otherwise log why the node is kept.
        """
        job, node = self._job, rank_state.node
        going = [each for each in job.ranks.member_states() if each.node == node]
        room = sum(
            free for other, free in job.nodes.room.items() if other not in {node, *job.nodes.lost}
        )
        why = f"rank {rank_state.rank} on node {node} had wrong copies in {times} incidents"
        alone = job.ranks.only_on(each.rank for each in going)
        if room >= len(going) and not alone:
            self._attempts.isolate(rank_state, why)
        else:
            why_not = (
                f"no rank elsewhere has shard {alone[0]!r}"
                if alone
                else "the other nodes have no room for all ranks of this node"
            )
            job.tell(
                "corruption_repeats",
                rank=rank_state.rank,
                node=node,
                why=why,
                why_not=why_not,
            )

    def tell_begins(self) -> None:
        """
        Log which ranks begin training with different copies of a shard. Training starts
        nevertheless, because the script may make the copies equal in its training loop. If the
        copies stay different, the next comparison of copies finds the difference.
        """
        found = self._differences()
        for difference in found:
            self._tell_begin(difference)
        self._note_equal_start(found)

    def _note_equal_start(self, found: Sequence[Difference]) -> None:
        """
        Record of which shards the initial states are equal. `found` are the differences between the
        copies that the ranks hold. Do nothing if the initial states were compared before, or may
        still be made equal by the wrappers.
        """
        start = self._job.training.start
        if start.compared or self._job.training.untrained:
            return
        digested: Counter[str] = Counter()
        for rank_state in self._job.ranks.member_states():
            if rank_state.holdings.held == 0:
                digested.update((rank_state.holdings.digests or {}).keys())
        shared = {shard for shard, copies in digested.items() if copies > 1}
        start.equal |= shared - {each.shard for each in found}

    def _found(self, **which: bool) -> list[Difference]:
        """
        Return the differences between the copies that ranks hold. `which` has the arguments for the
        method `_differences`. Leave out differences between the initial states (step 0) of a shard
        if these states were not equal when training began. Such differences are only logged,
        because the script may send the state of one rank to the other ranks later.
        """
        found = self._differences(**which)
        self._note_equal_start(found)
        equal = self._job.training.start.equal
        begins = [each for each in found if each.step == 0 and each.shard not in equal]
        for each in begins:
            self._tell_begin(each)
        return [each for each in found if each not in begins]

    def _tell_begin(self, difference: Difference) -> None:
        shard, why = difference.shard, difference.sentence()
        self._job.training.found_unlike(shard, why)
        self._job.tell("begins_unlike", shard=shard, why=why)

    def confirms(self) -> bool:
        """
        Compare the copies of the shards after ranks were repaired (have fetched or loaded state).
        Return True if all copies are equal. Otherwise begin a new round of the incident, and return
        False. A rank whose fetched copy differs from the copies of other ranks is not trusted any
        more. Any other difference is handled as the method `judge` handles it.
        """
        brought = {
            rank_state.rank
            for rank_state in self._job.ranks.member_states()
            if rank_state.holdings.fetched
        }
        # after a repair all members must hold the same state. With `tails=False`, the copies of
        # ranks that were interrupted in the tail of a step are compared too
        found = [each for each in self._found(tails=False, outside=True) if each.wrong]
        failed = [each for each in found if brought.issuperset(each.wrong) and each.right]
        for each in failed:
            self._tell(each)
            for rank in each.wrong:
                self._job.ranks.states[rank].holdings.distrust()
        if failed:
            self._attempts.again(f"after a repair {failed[0].sentence()}")
        elif found:
            incident = self._job.incident
            attempts, round_ = incident.decision.attempts + 1, incident.round
            self._judge(found)
            if incident.round == round_:  # `_judge` has not begun a new round, so begin one here
                self._attempts.freeze()
            self._attempts.count(attempts, f"after a repair {found[0].sentence()}")
        return not found

    def _judge(self, found: list[Difference]) -> None:
        job = self._job
        named: dict[int, list[str]] = {}
        for difference in found:
            self._tell(difference)
            if difference.tail:
                for rank in difference.wrong:
                    job.ranks.states[rank].holdings.outrun |= {difference.shard}
            elif difference.right:
                self._has_spread(difference)
                for rank in difference.wrong:
                    named.setdefault(rank, []).append(difference.sentence())
            else:
                self._nobody_knows(difference)
        for rank, sentences in sorted(named.items()):
            rank_state = job.ranks.states[rank]
            rank_state.holdings.distrust()
            self._corrupted(rank, rank_state.position.step + 1, "; ".join(sentences))
            job.count(rank)
        self.blame(named)

    def _has_spread(self, difference: Difference) -> None:
        """
        Add a reservation (a reason why training may not continue exactly) to the incident report.
        The reservation says that gradients from a wrong copy may have reached the states of all
        ranks since the last comparison.
        """
        job, first = self._job, self._equal(difference) + 1
        # the method `differ` may have added a reservation (a reason why training may not continue
        # exactly) already. Add no second one if that reservation begins with an earlier or the same
        # step
        told = any(equal < first for _, equal in job.incident.spread.equals)
        if difference.step >= first and not told:
            why = (
                f"{difference.sentence()}; it is not known since when they differ: the "
                f"contributions of ranks {list(difference.wrong)} to all-reduces in steps {first} "
                f"to {difference.step} may be in the state of all ranks"
            )
            job.incident.exactness.reservations.append((first, why))

    def _tell(self, difference: Difference) -> None:
        self._job.tell(
            "copies_differ", shard=difference.shard, step=difference.step,
            right=list(difference.right), wrong=list(difference.wrong),
            parts=list(difference.parts),
        )  # fmt: skip

    def _nobody_knows(self, difference: Difference) -> None:
        job, equal = self._job, self._equal(difference)
        why = (
            f"{difference.sentence()}, and it is not known which copy is right: all copies later "
            f"than step {equal}, the last comparison, may be wrong"
        )
        if job.policy.corruption == "continue":
            self._take_lowest(difference)
            why = f"{why}; the copy of rank {min(difference.wrong)} is used, since none is better"
            return self._corrupted(None, difference.step + 1, why)
        job.incident.spread.lower(equal)
        # the ceiling (last step whose copies may be used) may still allow step `equal`. A rank
        # with one of the differing copies may hold this step, so mark its copy as disputed
        for rank in difference.wrong:
            job.ranks.states[rank].holdings.disputed = True
        return self._corrupted(None, difference.step + 1, why)

    def _take_lowest(self, difference: Difference) -> None:
        """
        Prefer copies of the last step at which copies were equal, or of an earlier step. If no such
        copy is left, use the copy of the lowest rank in `difference`. Do not use the later copies
        of the other ranks in `difference`.
        """
        job, equal = self._job, self._equal(difference)
        lowest, *others = sorted(difference.wrong)
        # rule out only the later copies of this shard, not the copies of other shards on the rank
        for rank in others:
            job.ranks.states[rank].holdings.passed_over[difference.shard] = equal
        job.incident.spread.prefer(equal)
        why = (
            f"{difference.sentence()}, and it is not known which copy is right: the copy of rank "
            f"{lowest} was used, and the state of all ranks may be wrong since step {equal + 1}"
        )
        job.incident.exactness.reservations.append((equal + 1, why))

    def _corrupted(self, rank: int | None, step: int, why: str) -> None:
        """
        Add a `corruption` fault, because copies of a shard differ, unless the method `differ` has
        already added such a fault for this rank. `rank` is None if it is unknown which copy is
        wrong.
        """
        job = self._job
        if not job.incident.spread.equals or not any(
            (fault.kind, fault.rank) == ("corruption", rank) for fault in job.incident.faults
        ):
            self._attempts.fault("corruption", rank, step, job.timing.now, why)

    def _differences(self, *, tails: bool = True, outside: bool = False) -> list[Difference]:
        """
        Compare the copies of all members (the ranks that take part in training), and return the
        differences. Only members are named as ranks with wrong copies.

        With `outside`, also compare the copies of ranks that are no members, because members may
        have fetched state from such ranks. A rank that is no member is left out if it was
        interrupted in the tail of a step, because members may have come further in that tail. If
        `tails` is False, copies of members that were interrupted in a tail are compared like the
        copies of ranks that have ended the step.
        """
        job = self._job
        copies = {
            rank_state.rank: Copy(
                rank=rank_state.rank,
                step=rank_state.holdings.held,
                shards=rank_state.holdings.digests or {},
                tail=tails and rank_state.position.tail,
                line=rank_state.holdings.line,
                brought=rank_state.holdings.fetched,
            )
            for rank_state in self._sound(outside=outside)
            if rank_state.rank in job.ranks.members or not rank_state.position.tail
            if rank_state.holdings.held is not None
        }
        found = differences(job.ranks.topology().groups, copies)
        return [
            replace(each, wrong=tuple(r for r in each.wrong if r in job.ranks.members))
            for each in found
        ]

    def _sound(self, *, outside: bool = False, doubted: bool = False) -> list[RankState]:
        """
        Return the members (the ranks that take part in training) whose copies are not suspected to
        be wrong. With `doubted`, include members whose copies may be wrong. With `outside`, include
        ranks that are no members. Until the first wrapper (such as DDP) is built, leave out ranks
        that hold their initial state, because each rank may begin with a different state.
        """
        job, ceiling = self._job, self._job.incident.spread.ceiling
        return [
            rank_state
            for rank_state in (job.ranks.states.values() if outside else job.ranks.member_states())
            if _may_be_right(rank_state, doubted=doubted)
            if rank_state.holdings.held is not None
            and not (job.training.untrained and not rank_state.holdings.held)
            if ceiling is None or rank_state.holdings.held <= ceiling
        ]


def _may_be_right(rank_state: RankState, *, doubted: bool) -> bool:
    """
    Return True if the copies of a rank can be compared with the copies of other ranks. With
    `doubted`, this includes copies that may be wrong but were not in damaged memory.
    """
    holdings = rank_state.holdings
    if rank_state.process.terminating or holdings.searching or holdings.disputed:
        return False
    return holdings.trusted or (doubted and not holdings.damaged)


def uneven(ends: Mapping[int, int]) -> str:
    """
    Return a sentence that says after which steps the ranks have finished, or an empty text if all
    have finished after the same step. `ends` maps each rank to its last step.
    """
    by_step: dict[int, list[int]] = {}
    for rank, step in sorted(ends.items()):
        by_step.setdefault(step, []).append(rank)
    if len(by_step) < 2:
        return ""
    after = ", ".join(f"ranks {ranks} after step {step}" for step, ranks in sorted(by_step.items()))
    return f"the ranks have finished at different steps: {after}"


def not_compared(ranks: Sequence[int]) -> str:
    """
    Return a sentence for operators that says that the copies of `ranks` were not compared, because
    these ranks could not read their copies.
    """
    return f"the copies of ranks {list(ranks)} could not be read and were not compared"


def note_habits(job: Job, step: int) -> None:
    """
    Add reservations (reasons why training may not continue exactly) to the incident report for
    habits of the training loops. A habit is something that a loop does outside update windows and
    that tft cannot undo or repeat exactly. `step` is the step to whose end all ranks return, either
    to continue training or to save a checkpoint.
    """
    if step == 0:  # the ranks return to the start, so the training loops have had no effect yet
        return
    said: dict[str, list[int]] = {}
    for rank_state in job.ranks.member_states():
        for sentence in rank_state.declared.inexact:
            said.setdefault(sentence, []).append(rank_state.rank)
    for sentence, ranks in said.items():
        job.incident.exactness.reservations.append((step, f"ranks {ranks}: {sentence}"))


def note_tails(job: Job, step: int, standings: Standings) -> None:
    """
    Record for the incident report at which lines of code the tail of `step` (the code between the
    update and the end of the step) was interrupted. Record this only for shards of which no holder
    has ended `step`. Call this before ranks fetch state, because a rank that has fetched one shard
    no longer counts as interrupted, although its other shards may be from an interrupted tail.
    """
    job.incident.exactness.tails = {
        said: at for said, at in job.incident.exactness.tails.items() if at <= step
    }
    left: dict[str, set[int]] = {}
    ended = False
    for shard, ranks in job.ranks.topology().groups.items():
        found = sound(shard, ranks, standings, step, job.incident.spread.ceiling)
        late = [holder.rank for holder in found if holder.tail and holder.held == step]
        ended = ended or len(late) < len(found)
        for rank in late:
            left.setdefault(job.ranks.states[rank].holdings.line, set()).add(rank)
    among = " among the ranks that hold the same shard" if ended else ""
    for line, those in left.items():
        said = (
            f"ranks {sorted(those)} were cut off in the tail of step {step} at "
            f"{line or 'an unknown line'}, and no rank{among} is left that has ended the step: the "
            "code after that line was not run for this step (on a device: perhaps all of it was run, "
            "but with results of aborted collectives)"
        )
        job.incident.exactness.tails[said] = step


def forget_tails(job: Job, step: int) -> None:
    """
    Drop the records that the function `note_tails` has made about interrupted tails of `step` or
    later steps. Call this when all ranks load a checkpoint of `step`, because a checkpoint holds
    the state after the whole tail of its step.
    """
    job.incident.exactness.tails = {
        said: at for said, at in job.incident.exactness.tails.items() if at < step
    }
