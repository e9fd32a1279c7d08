"""
Find out which rank holds up the others when no rank makes progress. The code is pure: it reads no
clock and does no I/O.

The controller asks all ranks where they stand, long before the standstill counts as a fault. The
ranks of a process group must enter the same collectives in the same order. So a rank holds up the
others if it has entered fewer collectives than they have, or if it has entered another collective
than they have.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tft.core.link.newest_move import NewestMove
from tft.core.link.step_times import Moves, StepTimes
from tft.protocol.messages import Beat, GroupStanding, Whereabouts

STEPS = 3.0
"""The ranks are asked where they stand if none of them has made progress for this many median step
times plus `MARGIN` seconds."""
MARGIN = 0.5
"""The seconds that are added to `STEPS` median step times, because a busy machine may stop a
process for some tenths of a second."""
ANSWER = 0.3
"""If no further answer has come for this many seconds, the controller waits for no more answers.
The control thread of a rank needs only milliseconds to answer."""
LONGER = 1.25
"""If the job stood still earlier and then continued by itself, as in an evaluation, the ranks are
asked only after `LONGER` times the longest such standstill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Odd:
    """
    A rank that probably holds up other ranks.
    """

    rank: int
    why: str
    line: str
    """The line (FILE:LINE) of the user's code that the rank is executing. Empty: the line is not
    known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """
    What is known about a standstill.
    """

    silence: float
    """For how many seconds no rank had made progress when the ranks were asked."""
    odd: tuple[Odd, ...]
    answers: tuple[Whereabouts, ...]


class Standstill:
    """
    Watches the heartbeats of a job for a standstill, and judges the answers of the ranks. `times`
    has the step times of the job, and the ranks that train.
    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._moved = NewestMove()
        """The time of the last progress of any rank, by the clock of the controller."""
        self._longest = 0.0
        """The duration of the longest standstill so far that ended without an incident, in
        seconds."""
        self._asked = False
        """True if the ranks were already asked where they stand in the present standstill. They are
        asked only once in a standstill."""
        self._newest_answer = 0.0
        self._silence: float | None = None
        """How long no rank had made progress when the ranks were asked. None: the ranks were not
        asked, or the finding from their answers was returned already."""
        self._answers: dict[int, Whereabouts] = {}
        self.number = 0
        """The number of the last question to the ranks. Answers repeat this number."""

    def resumed(self, at: float) -> None:
        """
        Record that training begins or continues at the time `at`, so that the time before it does
        not count.
        """
        self._moved.forget()
        self._moved.not_before(at)
        self._asked = False

    def heard(self, beat: Beat, moves: Moves, at: float) -> bool:
        """
        Record a heartbeat that has arrived at the time `at`. `moves` is what it says about the
        progress of the ranks. Return True if all ranks must be asked now where they stand.
        """
        if moves.completed:
            self._progress(at)
        self._moved.heard(beat.node, at + moves.newest - beat.at)
        silence = at - self._moved.at
        if self._asked or silence <= self.limit() or not self._times.ranks:
            return False
        self._asked, self._silence, self._answers = True, silence, {}
        self._newest_answer = at
        self.number += 1
        return True

    def limit(self) -> float:
        """
        Return after how many seconds without progress the ranks are asked.
        """
        if not self._times.known:
            return float("inf")
        return max(STEPS * self._times.median + MARGIN, LONGER * self._longest)

    def answered(self, answer: Whereabouts, at: float) -> None:
        """
        Record the answer of a rank, which was read at the time `at`. An answer to an earlier
        question is ignored.
        """
        if answer.inquiry == self.number and self._asked:
            self._answers[answer.rank] = answer
            self._newest_answer = at

    def finding(self, at: float) -> Finding | None:
        """
        Return the finding from the answers, when all ranks have answered or the time for answers is
        over. Each standstill has one finding. Return None if there is no new finding.
        """
        if not self._asked or self._silence is None:
            return None
        # count from the newest answer, because reading the answers of many ranks takes longer than
        # `ANSWER`
        complete = len(self._answers) >= len(self._times.ranks)
        if not complete and at - self._newest_answer < ANSWER:
            return None
        missing = self._times.ranks - self._answers.keys()
        silence, self._silence = self._silence, None
        answers = tuple(self._answers[rank] for rank in sorted(self._answers))
        return Finding(silence=silence, odd=odd_ranks(answers, sorted(missing)), answers=answers)

    def _progress(self, at: float) -> None:
        if self._asked:
            self._longest = max(self._longest, at - self._moved.at)
            self._asked = False


def odd_ranks(answers: Sequence[Whereabouts], silent: Sequence[int]) -> tuple[Odd, ...]:
    """
    Return the ranks that hold up the others, by their answers. `silent` are the ranks that have not
    answered. If nothing distinguishes the ranks, return none.
    """
    if silent:
        why = "it does not answer, so even its control thread does not run"
        return tuple(Odd(rank=rank, why=why, line="") for rank in silent)
    waiting = {a.rank for a in answers if any(standing.inside for standing in a.groups)}
    found: dict[int, Odd] = {}
    for members in _groups(answers):
        for odd in _odd_in_group(members):
            found.setdefault(odd.rank, odd)
    if not found:
        busy = [answer for answer in answers if not answer.waiting]
        if 0 < len(busy) < len(answers):
            why = "it waits for no other rank, and all others wait"
            found = {each.rank: Odd(rank=each.rank, why=why, line=each.line) for each in busy}
    # a rank that has been found, but itself waits in a collective for another rank, is not the
    # cause: leave it out. But if all ranks that have been found wait, they wait for each other:
    # return all
    free = [rank for rank in sorted(found) if rank not in waiting]
    return tuple(found[rank] for rank in free or sorted(found))


_Members = Mapping[int, tuple[Whereabouts, GroupStanding]]
"""By rank that has answered and belongs to a certain process group: its answer, and how far it has
come in this group."""


def _groups(answers: Sequence[Whereabouts]) -> Iterable[_Members]:
    groups: dict[tuple[str, str], dict[int, tuple[Whereabouts, GroupStanding]]] = {}
    for answer in answers:
        for standing in answer.groups:
            members = groups.setdefault((standing.group, standing.members), {})
            members[answer.rank] = answer, standing
    return groups.values()


def _odd_in_group(members: _Members) -> Iterable[Odd]:
    """
    Yield the ranks that hold up the others in one process group. `members` has the ranks of the
    group that have answered.
    """
    most = max(standing.entered for _, standing in members.values())
    waiting = {
        rank: (answer, standing)
        for rank, (answer, standing) in members.items()
        if standing.entered == most and standing.inside
    }
    if not waiting:
        return
    behind = {r: each for r, each in members.items() if each[1].entered < most}
    if behind:
        first, (there, standing) = next(iter(waiting.items()))
        for rank, (answer, own) in behind.items():
            yield Odd(
                rank=rank,
                line=answer.line,
                why=f"it has entered {own.entered} collectives of the group {own.group!r}, and "
                f"{_named(waiting)} wait{'s' * (len(waiting) == 1)} in number {most} "
                f"({standing.inside}, rank {first} at {there.line or 'an unknown line'})",
            )
        return
    kinds = Counter(standing.inside for _, standing in waiting.values())
    if len(kinds) > 1:
        usual, times = kinds.most_common(1)[0]
        certain = times > len(waiting) / 2
        for rank, (answer, standing) in waiting.items():
            if standing.inside != usual or not certain:
                others = usual if standing.inside != usual else "another collective"
                yield Odd(
                    rank=rank,
                    line=answer.line,
                    why=f"it waits in {standing.inside} as collective number {most} of the group "
                    f"{standing.group!r}, and other ranks in {others}",
                )


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))}" + (
        f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    )
