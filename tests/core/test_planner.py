"""
Who copies what from whom, who saves what, and which step can be agreed on.
"""

from tft.core.planner import Holder, agreed_step, savers, transfers


def holders(**held: int | None) -> dict[int, Holder]:
    """
    Ranks by name (`r0=3`): what each holds; a rank in capitals (`R1`) is not trusted.
    """
    return {
        int(name[1:]): Holder(
            rank=int(name[1:]), address=f"h:{name[1:]}", held=step, trusted=name[0] == "r"
        )
        for name, step in held.items()
    }


def test_the_agreed_step_is_the_highest_one_that_every_shard_is_held_at() -> None:
    """
    When one shard is held at 5 and at 4, the other at 4 only, then 4 is agreed on.
    """
    groups = {"a": (0, 1), "b": (2, 3)}
    assert agreed_step(groups, holders(r0=5, r1=4, r2=4, r3=None)) == 4


def test_a_rank_that_is_not_trusted_never_sets_the_step() -> None:
    """
    When only a faulty rank is at 5, then 4 is agreed on.
    """
    assert agreed_step({"a": (0, 1)}, holders(R0=5, r1=4)) == 4


def test_a_shard_without_a_copy_is_named() -> None:
    """
    When nobody sound holds a shard, then the answer is the sentence that says which.
    """
    why = agreed_step({"a": (0,), "b": (1, 2)}, holders(r0=4, R1=4))
    assert why == "no sound copy of shard 'b' is left on ranks [1, 2]"


def test_copies_of_different_steps_do_not_make_a_whole() -> None:
    """
    When one shard is left at 4 and the other at 5, then there is no step to agree on.
    """
    why = agreed_step({"a": (0,), "b": (1,)}, holders(r0=4, r1=5))
    assert isinstance(why, str)
    assert "different steps" in why


def test_everyone_who_is_not_a_sound_holder_fetches_from_those_who_are() -> None:
    """
    When ranks are torn, behind or not trusted, then each fetches from all sound holders, and they
    do not all begin with the same one.
    """
    plan = transfers({"a": (0, 1, 2, 3, 4)}, holders(r0=4, r1=None, r2=3, R3=4, r4=4), 4)
    assert {rank: [s.rank for s in parts[0].sources] for rank, parts in plan.items()} == {
        1: [0, 4],
        2: [4, 0],
        3: [0, 4],
    }


def test_every_shard_has_one_saver() -> None:
    """
    When a shard has several sound holders, then the lowest-placed saves it.
    """
    plan = savers({"a": (0, 1), "b": (1, 2), "c": (2,)}, holders(r0=3, r1=4, r2=4), 4)
    assert plan == {1: ("a", "b"), 2: ("c",)}
