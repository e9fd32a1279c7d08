"""
The remarks of plugins, which outlive a controller.
"""

from pathlib import Path

from structlog.testing import capture_logs

from tft.controller.remarks import KEPT, Remarks
from tft.spi.types import Remark

SLOW = Remark(event="rank_slow", facts={"rank": 3, "why": "naïve"})


def test_a_restarted_controller_knows_the_remarks_of_its_run(tmp_path: Path) -> None:
    """When a controller is restarted, then it has the remarks of the same run, and none of another
    run, nor a row that was not written completely."""
    path = tmp_path / "remarks.jsonl"
    Remarks(path, "earlier").add(SLOW, 1.0)
    Remarks(path, "run").add(SLOW, 2.0)
    with path.open("a") as file:
        file.write('{"run": "run", "ev\n7\n')
    expected = [{"event": "rank_slow", "at": 2.0, "facts": dict(SLOW.facts)}]
    assert list(Remarks(path, "run").rows) == expected


def test_only_the_newest_remarks_are_kept(tmp_path: Path) -> None:
    """When a rank becomes slow again and again, then the newest remarks are kept, and the file does
    not grow for ever."""
    path = tmp_path / "remarks.jsonl"
    remarks = Remarks(path, "run")
    for at in range(11 * KEPT):
        remarks.add(SLOW, float(at))
    assert (len(remarks.rows), remarks.rows[-1]["at"]) == (KEPT, 11 * KEPT - 1)
    assert len(path.read_text().splitlines()) == 10 * KEPT


def test_a_full_disk_is_said_once(tmp_path: Path) -> None:
    """When remarks cannot be written, then this is logged once, and they are kept in memory."""
    remarks = Remarks(tmp_path / "missing" / "remarks.jsonl", "run")
    with capture_logs() as logs:
        for _ in range(3):
            remarks.add(SLOW, 1.0)
    assert [each["event"] for each in logs] == ["remarks_not_written"]
    assert len(remarks.rows) == 3
