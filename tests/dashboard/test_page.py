"""
What the page shows, from views and files that the test makes.
"""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from tft.controller.remarks import REMARKS
from tft.dashboard.curve import MOST, Curve
from tft.dashboard.grid import STATES, NodeRow, changes, codes, layout
from tft.dashboard.page import Page, encoded, size
from tft.dashboard.remarks import Remarks
from tft.dashboard.run import is_calm
from tft.dashboard.view import Curves, Disk, Past, Ranks, Stage, View
from tft.report.progress import Change, RunProgress, Sample

STATIC = Path(__file__).parents[2] / "tft" / "dashboard" / "static"
EVIL = "</script><img src=x onerror=alert(1)>\"'&"


def facts(world: int, **changed: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return the facts of a healthy job of `world` ranks on one node.
    """
    ranks = [
        {
            "rank": rank, "node": 0, "pid": 7, "incarnation": 0, "step": 100, "training": True,
            "seconds_since_progress": 0.1, "step_seconds": 0.5, "stopped": False,
        }
        for rank in range(world)
    ]  # fmt: skip
    return {
        "state": "healthy", "command": ["train.py"], "open_incident": None, "ranks": ranks,
        "slowest": {"rank": 0, "step": 100}, "fastest": {"rank": 0, "step": 100}, "incidents": 0,
        "step_seconds": 0.5, "seconds_since_progress": 0.1, "missing_ranks": [],
        "ranks_left_out": [],
        "parts": {
            "broker": {"address": "a:1", "answers": True},
            "controller": {"answers": True, "epoch": 1},
            "nodes": [{"node": 0, "host": "h", "answers": True}],
        },
        **changed,
    }  # fmt: skip


def view(letters: str, **changed: Any) -> View:  # Any: fields of a view
    """
    Return a view of a job with one node.
    """
    rows = (NodeRow(node=0, host="h", ranks=f"0-{len(letters) - 1}"),)
    told: dict[str, Any] = {
        "name": "run", "mood": "healthy", "title": "healthy", "facts": facts(len(letters)),
        "ranks": Ranks(codes=letters, rows=rows),
    }  # fmt: skip
    return View(**(told | changed))


def test_texts_of_the_job_are_escaped() -> None:
    """When the script, the evidence and everything else has markup in it, then the page shows it as
    text."""
    fault = {"kind": "software", "rank": 1, "step": 3, "evidence": EVIL}
    incident = {"id": 1, "what": EVIL, "strategy": EVIL, "seconds": 1.0, "faults": [fault]}
    page = Page()
    message = page.update(
        view(
            "tf", name=EVIL, title=EVIL, trouble=EVIL, remarks=[EVIL],
            facts=facts(2, command=[EVIL], open_incident=incident),
            stages=[Stage(state=EVIL, means=EVIL, seconds=None)],
            past=[Past(number=1, run=1, when=EVIL, sentence=EVIL)],
        )
    )  # fmt: skip
    told = page.document() + "".join(message["sections"].values()) + page.rank(1)
    assert "<img" not in told
    assert told.count("&lt;img") >= 14
    ended = page.update(view("", mood="over", advice=[EVIL], facts={"state": "over", "command": (),
        "steps": 1, "exit_code": 0, "incidents": 0, "parts": None, "open_incident": None}))  # fmt: skip
    assert "<img" not in "".join(ended["sections"].values())


def test_message_has_only_what_has_changed() -> None:
    """When one rank changes, then the message has this rank and the texts about it, in one line."""
    page = Page()
    page.update(view("t" * 100))
    assert page.update(view("t" * 100)) == {}
    message = page.update(view("t" * 7 + "x" + "t" * 92))
    assert message["ranks"] == [(7, "x")]
    assert list(message) == ["sections", "ranks"]
    assert list(message["sections"]) == ["ranks"]
    assert encoded(message).count(b"\n") == 2
    assert page.whole()["codes"][7] == "x"


def test_points_are_sent_once_and_again_when_the_curve_is_another() -> None:
    """When a curve grows, then only its new points are sent. When it is another, all are."""
    page, points = Page(), [(0.0, 1, None), (1.0, 2, 0.5)]
    first = page.update(view("t", curves=Curves(points=points, version=(0, 1))))
    points.append((2.0, 3, 0.5))
    second = page.update(view("t", curves=Curves(points=points, version=(0, 1))))
    third = page.update(view("t", curves=Curves(points=points[:1], version=(0, 2))))
    assert (len(first["points"]), second["more"]) == (2, [(2.0, 3, 0.5)])
    assert len(third["points"]) == 1


def test_states_of_ranks_have_letters_by_how_bad_they_are() -> None:
    """When ranks are in different states, then each has the letter of the worst one."""
    told = facts(8, ranks_left_out=[7], missing_ranks=[6])
    told["ranks"] = told["ranks"][:6]
    told["ranks"][1]["training"] = False
    told["ranks"][2]["step"] = 90
    told["ranks"][3]["stopped"] = True
    told["open_incident"] = {"faults": [{"rank": 4}, {"rank": None}]}
    assert codes(told, 8, slow=[5, 3], behind=[], heard=True) == "twbzfsxo"
    assert codes(told, 8, slow=[5, 3], behind=[0], heard=False) == "hwbzfsuo"
    assert changes("ttt", "txt") == [(1, "x")]


def test_every_state_has_a_colour_a_letter_and_a_shape() -> None:
    """When the server knows a state, then the script and both themes of the page do too."""
    script, style = (STATIC / "page.js").read_text(), (STATIC / "page.css").read_text()
    for letter in STATES:
        assert style.count(f"--{letter}: #") == 2, letter
        assert f'{letter}: "' in script, letter
        assert letter == "u" or f'case "{letter}":' in script, letter


def test_nodes_have_their_ranks_as_stretches() -> None:
    """When a rank has moved to another node, then it is drawn there."""
    rows = layout({0: 0, 1: 1, 2: 1, 3: 1, 4: 0}, {0: "a"}, 5)
    assert [(row.node, row.host, row.ranks) for row in rows] == [(0, "a", "0, 4"), (1, "", "1-3")]


def test_curve_has_gaps_where_the_job_did_not_train() -> None:
    """When the state of the job has changed between two samples, then there is no step time."""
    run = RunProgress(run="r", opened=10.0, unix=0.0, world=1, from_step=0, first_incident=1)
    curve = Curve()
    run.changes.append(Change(at=10.0, state="healthy", incident=0))
    run.samples += [Sample(at=11.0, step=2, ranks=1), Sample(at=12.0, step=4, ranks=1)]
    curve.take(run)
    run.changes += [Change(at=12.5, state="freezing", incident=1), Change(at=19, state="healthy", incident=0)]  # fmt: skip
    run.samples.append(Sample(at=20.0, step=5, ranks=1))
    curve.take(run)
    assert curve.points == [(1.0, 2, None), (2.0, 4, 0.5), (10.0, 5, None)]


def test_long_curve_is_thinned() -> None:
    """When a job has trained for days, then the curve has as many points as before, from the begin to
    the end."""
    run = RunProgress(run="r", opened=0.0, unix=0.0, world=1, from_step=0, first_incident=1)
    run.changes.append(Change(at=0.0, state="healthy", incident=0))
    curve, step = Curve(), 0
    for _ in range(20):
        for _ in range(5_000):
            step += 1
            run.samples.append(Sample(at=float(step), step=step, ranks=1))
        curve.take(run)
    assert MOST // 4 <= len(curve.points) <= MOST
    assert curve.points[0][:2] == (1.0, 1)
    assert curve.points[-1][1] > step - 200
    assert all(seconds == 1.0 for _, _, seconds in curve.points[1:])
    places = [at for at, _, _ in curve.points]
    assert max(b - a for a, b in pairwise(places)) < 200


def row(run: str, event: str, **facts: object) -> str:
    """
    Return a row of the file of remarks.
    """
    return json.dumps({"run": run, "event": event, "at": 1.0, "facts": facts}) + "\n"


def test_remarks_of_this_run_are_shown(tmp_path: Path) -> None:
    """When the controller remarks that ranks are slow, then they are known until it says otherwise.
    Rows of an earlier run, cut rows and other rows do not count."""
    file = tmp_path / REMARKS
    remarks = Remarks(path=file)
    remarks.read("now")
    slow = {
        "node": 0, "step": 141, "cause": "input", "seconds": 0.01, "percent": 31.2,
        "compared_with": "peers",
    }  # fmt: skip
    file.write_text(
        row("before", "rank_slow", rank=1, **slow)
        + row("now", "rank_slow", rank=2, **slow)
        + row("now", "rank_slow", rank="no")
        + row("now", "rank_behind", rank=4, line="a.py:7", why='say "no", wait')
        + "7\nno JSON\n"
        + row("now", "rank_slow", rank=3, **slow)[:-20]
    )
    remarks.read("now")
    assert list(remarks.slow) == [2]
    assert remarks.slow[2].startswith(
        "rank 2 on node 0 is slow since step 141: its input takes 10 ms"
    )
    assert remarks.behind == {4: 'rank 4 stands at a.py:7: say "no", wait'}
    with file.open("a") as more:
        more.write(row("now", "rank_slow", rank=3, **slow)[-20:])
        more.write(row("now", "rank_slow_over", rank=2))
    remarks.read("now")
    assert list(remarks.slow) == [3]
    remarks.read("next")
    assert not remarks.slow
    assert not remarks.behind


def test_little_free_space_is_named() -> None:
    """When less than a twentieth of the disk is free, then the page says so."""
    page = Page()
    page.update(view("t", disk=Disk(free=2_000_000_000, size=100_000_000_000)))
    assert "2 GB of 100 GB free, which is little" in page.whole()["sections"]["parts"]
    assert [size(999), size(1000), size(1_500_000_000_000)] == ["999 B", "1 kB", "1.5 TB"]


def test_closed_incident_is_not_going_on_without_a_controller() -> None:
    """When the controller is gone after an incident, then the last state in the story says whether the
    incident goes on. A state that a controller says comes first."""
    silent = {"controller": {"answers": False, "epoch": 1}}
    parts = {**facts(2)["parts"], **silent}
    gone = facts(2, state="unknown", parts=parts)
    assert is_calm(gone, "healthy")
    assert not is_calm(gone, "repairing")
    assert not is_calm({**gone, "open_incident": {"id": 1}}, "healthy")
    assert not is_calm(facts(2, state="freezing"), "healthy")
    assert is_calm(facts(2), "resuming")


def test_rank_is_told_with_where_it_stands() -> None:
    """When a rank is asked for, then its line has the node, the step and the process."""
    page = Page()
    assert "no rank 3" in page.rank(3)
    page.update(view("tt"))
    assert "rank 1: trains, node 0, step 100" in page.rank(1)
    assert json.dumps(page.whole())


@pytest.mark.parametrize(
    ("name", "width"), [("dashboard.webp", 1280), ("dashboard_narrow.webp", 390)]
)
def test_picture_of_the_page_is_small(name: str, width: int) -> None:
    """When the documentation shows the page, then the picture has the width of the window, and less
    than 100 kB."""
    content = (Path(__file__).parents[2] / "docs" / "pictures" / name).read_bytes()
    assert (content[:4], content[8:16]) == (b"RIFF", b"WEBPVP8X")
    assert int.from_bytes(content[24:27], "little") + 1 == width
    assert len(content) < 100_000
