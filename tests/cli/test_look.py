"""
What a look at a job knows, and which ranks stand out, from messages that the test makes.
"""

from typing import Any

import pytest

from tft.cli.status import lines
from tft.launcher.look import Watch
from tft.launcher.situation import standing_out
from tft.protocol.messages import Beat, Envelope, Lead, Message, News, Notice, Position, Pulse

rich_console = pytest.importorskip("rich.console")


def says(watch: Watch, message: Message, sender: str = "s") -> None:
    """
    Let the look hear a message.
    """
    watch.heard(Envelope(job="j", sender=sender, number=0, message=message))


def beat(at: float, step: int, *, closed: float, rank: int = 0, window: bool = False) -> Beat:
    """
    Return a heartbeat of node 0 with one rank that closed the window of `step` at `closed`.
    """
    position = Position(step=step, window=window)
    pulse = Pulse(rank=rank, incarnation=0, position=position, training=True, moved=closed)
    return Beat(node=0, pulses=(pulse,), at=at)


def test_step_time_does_not_depend_on_the_moments_of_heartbeats() -> None:
    """When steps end between heartbeats, then their mean time is that of the ends of their windows.
    A heartbeat within a window says nothing."""
    watch = Watch()
    says(watch, Lead(epoch=1, heard={}, state="healthy"))
    says(watch, beat(10.0, 4, closed=9.9))
    says(watch, beat(10.6, 6, closed=10.55, window=True))
    assert watch.ranks()[0].step_seconds is None
    says(watch, beat(11.0, 8, closed=10.9))

    assert watch.ranks()[0].step_seconds == pytest.approx(0.25)
    assert watch.ranks()[0].standstill == pytest.approx(0.1, abs=0.05)


def test_time_of_an_incident_is_not_that_of_a_step() -> None:
    """When an incident lies between two steps, then the step time begins anew."""
    watch = Watch()
    for state, step, closed in (("healthy", 4, 1.0), ("freezing", 4, 1.0), ("healthy", 5, 9.0)):
        says(watch, Lead(epoch=1, heard={}, state=state))
        says(watch, beat(closed + 0.1, step, closed=closed))

    assert watch.ranks()[0].step_seconds is None


def test_message_of_an_earlier_controller_is_left_out() -> None:
    """When a controller with a lower epoch still speaks, then it does not count."""
    watch = Watch()
    says(watch, Lead(epoch=2, heard={"rank.3/1.4711": 5, "node.0/0": 2}, state="healthy"))
    says(watch, Lead(epoch=1, heard={}, state="ended"))

    assert (watch.state, watch.pids()) == ("healthy", {(3, 1): 4711})


def test_last_remarks_are_those_of_the_controller_that_leads() -> None:
    """When the controller repeats its sentences, then the look knows the last ones. What an earlier
    controller still says does not count."""
    watch = Watch()
    says(watch, Lead(epoch=2, heard={}, state="healthy"))
    says(watch, News(epoch=2, notices=(Notice(number=1, text="rank 1 is slow"),)))
    says(watch, News(epoch=1, notices=(Notice(number=9, text="old"),)))

    assert [notice.text for notice in watch.notices] == ["rank 1 is slow"]


def test_look_is_complete_when_every_part_has_answered() -> None:
    """When a controller leads, each node has sent two heartbeats and each rank has ended two steps,
    then nothing more is waited for."""
    watch = Watch()
    says(watch, beat(1.0, 1, closed=0.9))
    assert not watch.complete({0}, steps=False)
    says(watch, Lead(epoch=1, heard={}, state="healthy"))
    assert watch.complete({0}, steps=False)
    assert not watch.complete({0, 1}, steps=False)
    assert not watch.complete({0}, steps=True)
    says(watch, beat(1.5, 2, closed=1.4))
    assert watch.complete({0}, steps=True)


# ---------------------------------------------------------------- facts of a large job


def facts(world: int, **changed: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
    """
    Return the facts of a healthy job of `world` ranks, eight on each node. `changed` has fields of
    single ranks, as `r5={"step": 3}`.
    """
    ranks = [
        {
            "rank": rank, "node": rank // 8, "pid": 9000 + rank, "incarnation": 0, "step": 1000,
            "training": True, "update_window": False, "seconds_since_progress": 0.1,
            "step_seconds": 0.5, "stopped": False, **changed.get(f"r{rank}", {}),
        }
        for rank in range(world)
    ]  # fmt: skip
    nodes = [
        {
            "node": node, "host": f"10.0.{node}.1", "pid": 400 + node, "answers": True,
            "ranks": [*range(8 * node, 8 * node + 8)],
        }
        for node in range(world // 8)
    ]  # fmt: skip
    return {
        "run_dir": "/shared/" + "a-long-name/" * 8, "state": "healthy", "open_incident": None,
        "slowest": {"rank": 0, "step": 1000}, "fastest": {"rank": 0, "step": 1000},
        "step_seconds": 0.5, "seconds_since_progress": 0.1, "incidents": 0, "last_incident": None, "remarks": [],
        "ranks": ranks, "missing_ranks": [], "ranks_left_out": [], "story_failure": "",
        "parts": {
            "broker": {"address": "10.0.0.1:29400", "answers": True},
            "controller": {"answers": True, "epoch": 1}, "nodes": nodes,
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"stopped": True}, "its process is stopped (SIGSTOP)"),
        ({"training": False}, "is not in the training loop"),
        ({"step": 998}, "is 2 steps behind"),
        ({"step": 999}, None),  # heartbeats are not sent at the same moment
        ({"seconds_since_progress": 1.6}, "has made no progress for 1.6 s"),
        ({"seconds_since_progress": 1.4}, None),  # less than three steps
    ],
)
def test_rank_stands_out_for_one_reason(changed: dict[str, Any], reason: str | None) -> None:
    """When one rank differs from the others by enough, then it alone stands out."""
    found = standing_out(facts(16, r5=changed))

    assert found == ([] if reason is None else [(5, reason)])


def test_short_steps_are_compared_in_time() -> None:
    """When steps are short, then a rank that is some steps behind has only sent its heartbeat
    earlier."""
    told = {**facts(16, r5={"step": 997}), "step_seconds": 0.02}
    assert standing_out(told) == []
    told["step_seconds"] = 0.4
    assert standing_out(told) == [(5, "is 3 steps behind")]


def test_no_rank_stands_out_when_all_stand_still() -> None:
    """When no rank makes progress, then the job hangs, and no single rank is named."""
    still = {f"r{rank}": {"seconds_since_progress": 9.0} for rank in range(16)}
    assert standing_out({**facts(16, **still), "seconds_since_progress": 9.0}) == []


@pytest.mark.parametrize(("width", "height"), [(80, 24), (132, 50)])
def test_picture_of_a_thousand_ranks_fits_the_terminal(width: int, height: int) -> None:
    """When a job has a thousand ranks, then the head stays on the screen, and the ranks and nodes
    that stand out are shown first."""
    from tft.cli.top import picture

    told = facts(1000, r700={"stopped": True})
    told["missing_ranks"] = [*range(16, 24)]
    told["ranks"] = [each for each in told["ranks"] if each["node"] != 2]
    told["parts"]["nodes"][2] |= {"answers": False, "ranks": []}
    console = rich_console.Console(width=width, height=height, color_system=None)
    with console.capture() as captured:
        console.print(picture(told, height))
    drawn = captured.get().splitlines()

    assert len(drawn) <= height
    assert max(map(len, drawn)) <= width
    assert drawn[0].startswith("healthy")
    text = "\n".join(drawn)
    assert text.index("silent") < text.index("10.0.0.1")
    assert "no heartbeat of ranks 16-23" in text
    assert "its process is stopped" in text


def test_status_of_a_thousand_ranks_shows_what_stands_out() -> None:
    """When a job has many ranks, then its lines name the ranks that stand out, and with `everything`
    all of them."""
    told = facts(1000, r700={"stopped": True})
    told["parts"]["nodes"][2]["answers"] = False
    short, long = lines(told, width=80), lines(told, everything=True, width=80)

    assert len(short) < 16
    assert "124 of 125 answer" in "\n".join(short)
    assert sum("SIGSTOP" in line for line in short) == 1
    assert len(long) > 1125
