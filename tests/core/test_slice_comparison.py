"""
The comparison of slices: what follows from the digests that beats bring.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tft.core.job.events import CorruptionTraced, SlicesAgreed, SlicesDiffered, SliceVerdict
from tft.core.link.slice_comparison import (
    CONTRIBUTION,
    KEPT,
    WAITING,
    Attempt,
    SliceComparison,
)
from tft.core.plan.topology import Replicas
from tft.protocol.messages import Beat, Position, Pulse, SliceDigest

OF = 3
"""The number of slices in these tests."""
FIRST = (0, 1)
"""The attempt after which the ranks of these tests train."""
AT = 9.0


def begun(
    *ranks: int, groups: Mapping[str, tuple[int, ...]] | None = None, step: int = 0
) -> SliceComparison:
    """
    Return a comparison for ranks that hold one shard `dense`, or the shards of `groups`.
    """
    comparison = SliceComparison()
    comparison.resumed(FIRST, step, replicas(*ranks, groups=groups))
    return comparison


def replicas(
    *ranks: int,
    groups: Mapping[str, tuple[int, ...]] | None = None,
    columns: Mapping[int, tuple[int, ...]] | None = None,
) -> Replicas:
    held = groups or {"dense": ranks}
    return Replicas(
        groups=held,
        columns=columns or {},
        names={rank: tuple(s for s, holders in held.items() if rank in holders) for rank in ranks},
    )


def digest(
    step: int, content: int, *, shard: int = 0, number: int | None = None, attempt: Attempt = FIRST
) -> SliceDigest:
    return SliceDigest(
        incident=attempt[0],
        round=attempt[1],
        step=step,
        number=step % OF if number is None else number,
        of=OF,
        shard=shard,
        digest=content,
    )


def beat(rank: int, *digests: SliceDigest, kept: int = 0) -> Beat:
    pulse = Pulse(
        rank=rank,
        incarnation=0,
        position=Position(step=0, window=False),
        training=True,
        moved=0.0,
        digests=digests,
        kept=kept,
    )
    return Beat(node=rank, pulses=(pulse,), at=0.0)


def train(
    comparison: SliceComparison, ranks: Iterable[int], steps: Iterable[int], **which: Any
) -> None:
    """
    Let the ranks report equal slices of these steps.
    """
    for step in steps:
        for rank in ranks:
            comparison.heard(beat(rank, digest(step, 100 + step, **which)))


def verdicts(comparison: SliceComparison) -> list[SliceVerdict]:
    found = []
    while (verdict := comparison.verdict(AT, calm=True)) is not None:
        found.append(verdict)
    return found


def test_copies_count_as_compared_after_a_whole_cycle_of_slices() -> None:
    """When every slice was equal on all ranks, then all copies are compared up to the step at which
    the cycle began, and this is said once for each cycle."""
    comparison = begun(0, 1, step=4)
    train(comparison, (0, 1), range(5, 5 + OF - 1))
    assert (comparison.compared, verdicts(comparison)) == (4, [])
    train(comparison, (0, 1), [4 + OF])
    assert comparison.compared == 5
    train(comparison, (0, 1), range(5 + OF, 15))
    assert comparison.compared == 15 - OF
    assert verdicts(comparison) == [SlicesAgreed(at=AT, step=7), SlicesAgreed(at=AT, step=10)]


def test_compared_step_is_said_as_soon_as_it_covers_a_kept_copy() -> None:
    """When the ranks keep a copy of a step and that step is compared, then this is said before the
    cycle ends: the ranks wait for it."""
    comparison = begun(0, 1)
    train(comparison, (0, 1), range(1, 4))
    comparison.heard(beat(0, digest(4, 104), kept=2))
    comparison.heard(beat(1, digest(4, 104), kept=2))
    assert verdicts(comparison) == [SlicesAgreed(at=AT, step=2)]


def test_majority_names_the_wrong_copy() -> None:
    """When one of three copies of a slice differs, then that rank is wrong, and the copies are
    sound up to the step at which this slice was equal last."""
    comparison = begun(0, 1, 2)
    train(comparison, (0, 1, 2), range(1, 8))
    verdicts(comparison)
    for rank, content in ((0, 1), (1, 2), (2, 1)):
        comparison.heard(beat(rank, digest(8, content)))
    assert verdicts(comparison) == [
        SlicesDiffered(at=AT, shard="dense", step=8, right=(0, 2), wrong=(1,), sound=5)
    ]
    train(comparison, (0, 1, 2), range(9, 20))
    assert verdicts(comparison) == []


@pytest.mark.parametrize("contents", [(1, 2), (1, 1, 2, 2), (1, 2, 3)])
def test_copies_without_a_majority_name_nobody(contents: tuple[int, ...]) -> None:
    """When no content of a slice is on more ranks than every other, then all holders are named, and
    none counts as right."""
    ranks = tuple(range(len(contents)))
    comparison = begun(*ranks)
    for rank in ranks:
        comparison.heard(beat(rank, digest(1, contents[rank])))
    (found,) = verdicts(comparison)
    assert isinstance(found, SlicesDiffered)
    assert (found.right, found.wrong, found.sound) == ((), ranks, 0)


def test_shards_are_compared_among_their_own_holders() -> None:
    """When ranks hold several shards, then a digest is compared with those of the same shard only,
    by the numbers that each rank gives its shards."""
    groups = {"a": (0, 1), "b": (1, 2), "c": (0, 2)}
    comparison = begun(0, 1, 2, groups=groups)
    for step in range(1, OF + 1):
        comparison.heard(beat(0, digest(step, 10), digest(step, 30, shard=1)))
        comparison.heard(beat(1, digest(step, 10), digest(step, 20, shard=1)))
        comparison.heard(beat(2, digest(step, 20), digest(step, 30, shard=1)))
    assert comparison.compared == 1
    assert verdicts(comparison) == []
    comparison.heard(beat(2, digest(4, 21)))
    comparison.heard(beat(1, digest(4, 20, shard=1)))
    (found,) = verdicts(comparison)
    assert isinstance(found, SlicesDiffered)
    assert (found.shard, found.wrong) == ("b", (1, 2))


def test_digests_of_an_earlier_attempt_are_ignored() -> None:
    """When digests arrive that were made before the ranks were brought to another step, then they
    are not compared with those of the same step that are made after it."""
    comparison = begun(0, 1)
    comparison.heard(beat(0, digest(1, 7)))
    comparison.resumed((1, 2), 0, replicas(0, 1))
    comparison.heard(beat(1, digest(1, 8)))
    comparison.heard(beat(0, digest(1, 9, attempt=(1, 2))))
    comparison.heard(beat(1, digest(1, 9, attempt=(1, 2))))
    assert verdicts(comparison) == []


def test_verdict_that_an_incident_overtakes_is_dropped() -> None:
    """When the ranks resume before a verdict was taken, then the verdict is dropped."""
    comparison = begun(0, 1)
    comparison.heard(beat(0, digest(1, 1)))
    comparison.heard(beat(1, digest(1, 2)))
    comparison.resumed((1, 1), 0, replicas(0, 1))
    assert verdicts(comparison) == []


def test_pause_does_not_begin_the_comparison_again() -> None:
    """When the ranks resume after a pause, in the same attempt, then what was compared before
    counts."""
    comparison = begun(0, 1)
    train(comparison, (0, 1), range(1, 5))
    comparison.resumed(FIRST, 0, replicas(0, 1))
    assert comparison.compared == 2


def test_lost_digests_delay_the_comparison_and_do_not_end_it() -> None:
    """When the digest of one step never arrives, then the copies count as compared again after a
    cycle behind the gap."""
    comparison = begun(0, 1)
    train(comparison, (0, 1), [1])
    comparison.heard(beat(0, digest(2, 102)))
    train(comparison, (0, 1), range(3, 3 + WAITING))
    assert comparison.compared == 0
    train(comparison, (0, 1), range(3 + WAITING, 4 + WAITING))
    assert comparison.compared == 4 + WAITING - OF


def test_digests_of_a_rank_that_never_reports_are_not_waited_for_without_limit() -> None:
    """When one rank reports no digests, then those of the other ranks are kept for a number of
    steps only: no step before can be compared any more. Later steps are compared as soon as the
    rank reports some."""
    comparison = begun(0, 1)
    train(comparison, (0,), range(1, 2 * KEPT))
    train(comparison, (1,), range(1, KEPT))
    assert comparison.compared == 0
    train(comparison, (0, 1), range(2 * KEPT, 2 * KEPT + WAITING + OF))
    assert comparison.compared > 2 * KEPT


def contribute(
    comparison: SliceComparison, rank: int, step: int, content: int, attempt: Attempt
) -> None:
    comparison.heard(beat(rank, digest(step, content, number=CONTRIBUTION, attempt=attempt)))


def test_rank_with_the_wrong_copy_is_named_when_the_steps_are_computed_again() -> None:
    """When two copies differ, all ranks return, and the steps are computed again, then the rank
    whose gradients are the first to come out otherwise is named. Those of the other rank follow a
    step later, since the wrong gradients spread."""
    comparison = begun(0, 1)
    train(comparison, (0, 1), range(1, 4))
    before = {(4, 0): 40, (4, 1): 41, (5, 0): 50, (5, 1): 51, (6, 0): 60, (6, 1): 61}
    for (step, rank), content in before.items():
        contribute(comparison, rank, step, content, FIRST)
    comparison.heard(beat(0, digest(6, 1)))
    comparison.heard(beat(1, digest(6, 2)))
    (found,) = verdicts(comparison)
    assert isinstance(found, SlicesDiffered)
    again = (1, 1)
    comparison.resumed(again, 2, replicas(0, 1))
    for (step, rank), content in {**before, (5, 1): 99, (6, 0): 98, (6, 1): 97}.items():
        assert verdicts(comparison) == []
        contribute(comparison, rank, step, content, again)
        if (step, rank) == (5, 1):
            break
    assert verdicts(comparison) == [CorruptionTraced(at=AT, incident=1, ranks=(1,), step=4)]


SHARDS = {"first": (0, 2), "second": (1, 3)}
COLUMNS = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}


AGAIN = (1, 1)
"""The attempt in which the ranks compute step 1 again, after copies have differed."""


def disputed(
    before: Iterable[int],
    late: Iterable[int] = (),
    columns: Mapping[int, tuple[int, ...]] = COLUMNS,
) -> SliceComparison:
    """
    Return a comparison in which the copies of ranks 0 and 2 have differed in step 1, and the ranks
    have returned to the start. The ranks in `before` had reported the digest of their gradients,
    which is the number of the rank, before the difference was found, those in `late` after that.
    """
    comparison = SliceComparison()
    shards = replicas(0, 1, 2, 3, groups=SHARDS, columns=columns)
    comparison.resumed(FIRST, 0, shards)
    for rank in before:
        contribute(comparison, rank, 1, rank, FIRST)
    for rank in (0, 2):
        comparison.heard(beat(rank, digest(1, rank)))
    for rank in late:
        contribute(comparison, rank, 1, rank, FIRST)
    verdicts(comparison)
    comparison.resumed(AGAIN, 0, shards)
    return comparison


@pytest.mark.parametrize("wrong", [0, 2])
@pytest.mark.parametrize("late", [None, 1, 3], ids=["in order", "1 last", "3 last"])
def test_wrong_copy_shows_first_in_the_gradients_of_its_model_replica(
    wrong: int, late: int | None
) -> None:
    """When two copies of a shard differ and another rank of the same model replica is the first
    whose gradients come out otherwise, then the holder in that replica is named. Nobody is named
    before all ranks of the replicas have reported the step."""
    comparison = disputed(range(4))
    for rank in sorted(range(4), key=lambda rank: rank == late):
        assert verdicts(comparison) == []
        contribute(comparison, rank, 1, 99 if rank == wrong + 1 else rank, AGAIN)
    assert verdicts(comparison) == [CorruptionTraced(at=AT, incident=1, ranks=(wrong,), step=0)]


def test_gradients_that_arrive_after_the_difference_show_the_wrong_copy() -> None:
    """When digests of gradients arrive after copies were found to differ, then they too show which
    holder had the wrong copy."""
    comparison = disputed((0, 1, 2), late=(3,))
    for rank, content in {0: 0, 1: 1, 2: 2, 3: 99}.items():
        contribute(comparison, rank, 1, content, AGAIN)
    assert verdicts(comparison) == [CorruptionTraced(at=AT, incident=1, ranks=(2,), step=0)]


def test_nobody_is_named_when_gradients_of_an_uninvolved_rank_differ_too() -> None:
    """When the gradients of a rank that holds neither copy come out otherwise in the same step,
    then they have another cause, and no holder is named."""
    comparison = disputed(range(4), columns={1: (1, 3), 3: (1, 3)})
    for rank, content in {0: 99, 2: 2, 3: 3, 1: 99}.items():
        contribute(comparison, rank, 1, content, AGAIN)
    assert verdicts(comparison) == []


def test_rank_with_a_whole_model_may_compute_with_the_wrong_copy_of_another_one() -> None:
    """When ranks hold whole models, and share the state of the optimizer, then each takes parameters
    that one of the holders has updated. So the gradients of such a rank may come out otherwise
    together with those of the holder that had the wrong copy."""
    comparison = disputed(range(4), columns={})
    for rank, content in {0: 99, 2: 2, 3: 3, 1: 99}.items():
        contribute(comparison, rank, 1, content, AGAIN)
    assert verdicts(comparison) == [CorruptionTraced(at=AT, incident=1, ranks=(0,), step=0)]


def test_rank_of_a_replica_that_reports_no_gradients_is_not_waited_for() -> None:
    """When a rank of a model replica reports no digests of gradients, then the others show which
    holder had the wrong copy."""
    comparison = disputed((0, 1, 2))
    for rank, content in {0: 0, 1: 99, 2: 2}.items():
        contribute(comparison, rank, 1, content, AGAIN)
    assert verdicts(comparison) == [CorruptionTraced(at=AT, incident=1, ranks=(0,), step=0)]


@pytest.mark.parametrize(
    ("again", "wrong"), [(1, (1,)), (2, (0,)), (3, ())], ids=["second", "first", "both"]
)
def test_slice_that_is_computed_again_names_the_rank_with_the_wrong_copy(
    again: int, wrong: tuple[int, ...]
) -> None:
    """When two copies differ and no gradient shows which is wrong, then the slice of the same step,
    computed again, names the rank that had another one. If both had another one, nobody is
    named."""
    comparison = begun(0, 1)
    comparison.heard(beat(0, digest(2, 1)))
    comparison.heard(beat(1, digest(2, 2)))
    verdicts(comparison)
    comparison.resumed((1, 1), 0, replicas(0, 1))
    for rank in (0, 1):
        comparison.heard(beat(rank, digest(1, 5, attempt=(1, 1)), digest(2, again, attempt=(1, 1))))
    found = [each for each in verdicts(comparison) if isinstance(each, CorruptionTraced)]
    assert [each.ranks for each in found] == ([wrong] if wrong else [])


@pytest.mark.parametrize("changed", [(), (0, 1)])
def test_nobody_is_named_when_the_gradients_do_not_tell(changed: tuple[int, ...]) -> None:
    """When the gradients of both ranks come out otherwise in the same step, or those of none, then
    no rank is named."""
    comparison = begun(0, 1)
    for step in (1, 2):
        for rank in (0, 1):
            contribute(comparison, rank, step, 10 * step + rank, FIRST)
    comparison.heard(beat(0, digest(2, 1)))
    comparison.heard(beat(1, digest(2, 2)))
    verdicts(comparison)
    comparison.resumed((1, 1), 0, replicas(0, 1))
    for step in (1, 2, 3):
        for rank in (0, 1):
            other = 50 if step == 2 and rank in changed else 0
            contribute(comparison, rank, step, 10 * step + rank + other, (1, 1))
    assert verdicts(comparison) == []
