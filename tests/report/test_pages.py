"""
The pages of `tft report`: what they say, that they need nothing from outside, and that no text of the
script is markup.
"""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.e2e.jobs import ROOT
from tft.cli.main import tft
from tft.core.job.commands import JobOver
from tft.core.job.incident_report import job_report
from tft.report.facts import gather
from tft.report.html import html
from tft.report.markdown import markdown
from tft.report.picture import MOST, drawn
from tft.sentences import incident_sentence, seconds

EVIL = "Traceback:\n```\n</pre><script>alert('x')</script> & \"quoted\" | [link](http://x) ```"
PROGRESS = """
{"at":10,"unix":1000,"run":"r","opened":10.0,"epoch":1,"world":4,"from_step":0,"first_incident":1}
{"at":10,"unix":1000,"state":"awaiting","incident":0}
{"at":15,"unix":1005,"state":"healthy","incident":0}
{"at":16,"unix":1006,"step":2,"ranks":4}
{"at":17,"unix":1007,"step":12,"ranks":4}
{"at":18,"unix":1008,"step":22,"ranks":4}
{"at":19,"unix":1009,"state":"freezing","incident":1}
{"at":21,"unix":1011,"state":"healthy","incident":0}
{"at":22,"unix":1012,"step":40,"ranks":4}
{"at":23,"unix":1013,"state":"exiting","incident":0,"result":"completed"}
{"at":24,"unix":1014,"state":"ended","incident":0,"result":"completed"}
"""


def incident(**changes: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return the incident of the README's picture, with changes.
    """
    report = json.loads((ROOT / "docs/pictures/incident.json").read_text())
    found: dict[str, Any] = {**report["incidents"][0], "unprotected": [], "refused": [], **changes}
    return found


def fault(**changes: Any) -> dict[str, Any]:  # Any: JSON
    """
    Return a fault of a rank, with changes.
    """
    return {
        "kind": "process", "rank": 2, "step": 30, "at": 0.0, "evidence": "was ended by signal 9",
        **changes,
    }  # fmt: skip


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """
    Return the run directory of a job with one incident, whose evidence is written like markup.
    """
    over = JobOver(result="completed", code=0, why="every <b>rank</b> has finished")
    entry = incident(faults=[fault(evidence=EVIL)], inexact=["a <i>reason</i>"])
    report = job_report(over, 50, [entry], [{"rank": 1, "why": EVIL, "step": 5, "times": 2}])
    report["remarks"] = [
        {"event": "rank_slow", "at": 1.0, "facts": {"rank": "<u>3</u>"}},
        {"event": "logger_failed_over", "at": 2.0, "facts": {"logger": "wandb"}},
    ]
    found = tmp_path / "a <run>"
    found.mkdir()
    (found / "report.json").write_text(json.dumps(report))
    (found / "progress.jsonl").write_text(PROGRESS)
    (found / "records-rank0.jsonl").write_text(
        "".join(json.dumps({"step": n, "loss": 5 / n}) + "\n" for n in range(1, 50))
    )
    return found


def call(*arguments: object) -> Result:
    """
    Run `tft report`.
    """
    return CliRunner().invoke(tft, ["report", *map(str, arguments)])


class _Tags(HTMLParser):
    """
    Collects the tags of a page, with their attributes, and checks that they are closed in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag."""
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag that is closed at once."""
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        """Check that the tag that was opened last is closed."""
        assert self.open.pop() == tag


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """
    Return the tags of a page. Fail the test if they are not closed in order.
    """
    parser = _Tags()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser.tags


def test_page_needs_nothing_from_outside(run_dir: Path) -> None:
    """When the page is opened, then it loads nothing, runs no script, and all its links lead to
    places in itself."""
    found = tags(html(gather(run_dir)))
    names = {name for name, _ in found}
    assert names.isdisjoint({"script", "link", "img", "iframe", "b", "i", "u", "run"})
    targets = {
        value for _, attrs in found for key, value in attrs.items() if key in ("href", "src")
    }
    ids = [f"#{attrs['id']}" for _, attrs in found if attrs.get("id")]
    assert targets
    assert targets <= set(ids)
    assert len(set(ids)) == len(ids)


def test_page_says_what_happened(run_dir: Path) -> None:
    """When a job has one incident, then the page has the end, the goodput, both curves and the
    incident with its picture."""
    page = html(gather(run_dir))
    for text in (
        "The job has completed, with 50 steps.",
        "42.9 %",  # 6 s of training in 14 s
        "Time of a step",
        "<h2>Loss</h2>",
        "incidents: recover",
        "Checkpoints that could not be written",
        "rank_slow: rank &lt;u&gt;3&lt;/u&gt;",
        "the logger wandb takes values again",
        "1970-01-01 00:16:40 UTC",  # the begin of the run
        "1970-01-01 00:16:49 UTC",  # the incident
    ):
        assert text in page, text
    assert page.count("<svg") == 4


def test_markdown_shows_the_evidence_as_it_is(run_dir: Path) -> None:
    """When evidence has fences of its own, then a longer fence is around it, and nothing outside of
    a fence is markup."""
    done = call(run_dir, "--markdown", run_dir / "x.md")
    assert done.exit_code == 0, done.output
    text = (run_dir / "x.md").read_text()
    assert f"````text\n{EVIL}\n````" in text
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    assert "<script>" not in re.sub(r"\\.", "", outside)
    assert not (run_dir / "report.html").exists()


def test_default_is_a_page_in_the_run_directory(run_dir: Path) -> None:
    """When no option is given, then `report.html` in the run directory is written and named."""
    done = call(run_dir)
    assert done.exit_code == 0, done.output
    assert str(run_dir / "report.html") in done.stderr
    assert (run_dir / "report.html").read_text() == html(gather(run_dir))


def test_out_has_all_three_forms(run_dir: Path, tmp_path: Path) -> None:
    """When a directory is named, then it gets the page, the Markdown and the JSON."""
    done = call(run_dir, "--out", tmp_path / "new" / "place")
    assert done.exit_code == 0, done.output
    names = {path.name for path in (tmp_path / "new" / "place").iterdir()}
    assert names == {"report.html", "report.md", "summary.json"}


def test_pipe_is_written_to_and_not_replaced(run_dir: Path, tmp_path: Path) -> None:
    """When the file is a link to a device, then the device gets the text and the link stays."""
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    assert call(run_dir, "--html", link).exit_code == 0
    assert link.is_symlink()


def test_dash_is_the_standard_output(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the file is `-`, then the report is printed and no file has this name. Two reports at once
    are refused."""
    monkeypatch.chdir(tmp_path)
    for option, content in (("--html", html), ("--markdown", markdown)):
        done = call(run_dir, option, "-")
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout == content(gather(run_dir))
    assert not (tmp_path / "-").exists()
    assert "only one of" in str(call(run_dir, "--html", "-", "--json").exception)


def test_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    """When no job has run in a directory, then nothing is written, and the reason is given."""
    done = call(tmp_path)
    assert "no job has run in" in str(done.exception)
    assert list(tmp_path.iterdir()) == []


def test_file_that_cannot_be_written_is_refused(run_dir: Path) -> None:
    """When the page cannot be written, then the sentence names the file."""
    done = call(run_dir, "--html", run_dir / "report.json" / "x.html")
    assert "cannot be written" in str(done.exception)


def test_damaged_records_are_said_and_left_out(run_dir: Path) -> None:
    """When rows and the report are damaged, then the rest is shown, and the page says what is
    missing."""
    (run_dir / "progress.jsonl").write_text(
        PROGRESS + '{"at":\n[1]\n{"at":25,"unix":1,"step":"x"}\n'
    )
    (run_dir / "report.json").write_text("{")
    facts = gather(run_dir)
    assert facts.result == "unfinished"
    assert any("3 rows of progress.jsonl" in note for note in facts.notes)
    assert any("report.json cannot be read" in note for note in facts.notes)
    assert any("because of the story" in note for note in facts.notes)
    tags(html(facts))
    (run_dir / "progress.jsonl").write_text(PROGRESS + "[1]\n")
    assert any(
        "1 row of progress.jsonl cannot be read and was left out" in note
        for note in gather(run_dir).notes
    )


def test_job_of_an_earlier_version_has_a_page_without_goodput(run_dir: Path) -> None:
    """When there is no progress.jsonl, then the page has the incidents of the report, and says what
    is missing."""
    (run_dir / "progress.jsonl").unlink()
    facts = gather(run_dir)
    assert facts.goodput is None
    assert len(facts.incidents) == 1
    page = html(facts)
    assert "there is no progress.jsonl" in page
    assert "Goodput" not in page


def test_controller_on_a_restarted_machine_goes_on_in_time(run_dir: Path) -> None:
    """When a controller goes on after its machine has restarted, so that CLOCK_MONOTONIC is lower,
    then the time of day tells how much later it is."""
    first = PROGRESS.split("\n")[1:5]
    again = first[0].replace('"at":10,"unix":1000', '"at":3,"unix":1100').replace(
        '"epoch":1', '"epoch":2'
    )  # fmt: skip
    end = '{"at":7,"unix":1104,"state":"ended","incident":0,"result":"completed"}'
    (run_dir / "progress.jsonl").write_text("\n".join([*first, again, end, ""]))
    [run] = gather(run_dir).runs
    assert run.goodput.wall == pytest.approx(104.0)
    assert len(run.progress.leads) == 2


def rows_of_run(at: int, run: str, from_step: int, *steps: int) -> str:
    """
    Return the rows of a run that begins at the time `at`, has one incident with the number 1, trains
    these steps, one each second, and is killed.
    """
    lead = {"run": run, "opened": float(at), "epoch": 1, "world": 4, "from_step": from_step}
    rows: list[dict[str, Any]] = [
        {**lead, "first_incident": 1},
        {"state": "awaiting", "incident": 1},
        {"state": "healthy", "incident": 0},
        *({"step": step, "ranks": 4} for step in steps),
    ]
    return "".join(
        json.dumps({"at": at + n, "unix": 1000 + at + n, **row}) + "\n"
        for n, row in enumerate(rows)
    )


def test_steps_that_any_later_run_threw_away_were_not_kept(run_dir: Path) -> None:
    """When a third run continues from before the second one, or a run begins from an older checkpoint
    than the newest, then the steps of the first run after that were not kept."""
    (run_dir / "report.json").unlink()
    first = rows_of_run(10, "a", 0, 1, 11, 21, 31, 41)
    second = rows_of_run(100, "b", 40, 41, 51)
    third = rows_of_run(200, "c", 20, 21, 31)
    unloaded = rows_of_run(200, "c", 40, 21, 31)

    for last in (third, unloaded):
        (run_dir / "progress.jsonl").write_text(first + second + last)
        again = [
            part.times
            for run in gather(run_dir).runs
            for part in run.goodput.parts
            if part.kind == "again"
        ]
        assert again == [21, 11, 0]


def test_incident_names_its_run_if_there_are_several(run_dir: Path) -> None:
    """When the incidents of a job are of two runs, then both pages say of which run each one is."""
    report = json.loads((run_dir / "report.json").read_text())
    report["incidents"].append(incident(id=2))
    (run_dir / "report.json").write_text(json.dumps(report))
    later = PROGRESS.replace('"run":"r"', '"run":"s"').replace('incident":1', 'incident":2')
    (run_dir / "progress.jsonl").write_text(PROGRESS + later)
    facts = gather(run_dir)
    for page in (html(facts), markdown(facts)):
        assert page.count("Incident 1 of run 1") == page.count("Incident 2 of run 2") == 1


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "Rank 2 was killed by SIGKILL in step 30; replaced in 1.43 s; no step lost."),
        (
            {"faults": [fault(rank=rank, evidence="left with code 3") for rank in (0, 1, 2, 5)]},
            "Ranks 0-2, 5 left with exit code 3 in step 30; replaced in 1.43 s; no step lost.",
        ),
        (
            {
                "faults": [fault(kind="hang", rank=None, evidence="x"), fault(kind="memory")],
                "strategy": "retry", "steps_lost": 1,
            },
            "The job stood still in step 30; rank 2 met a memory fault of its device in step 30; all "
            "processes were kept in 1.43 s; 1 step computed again.",
        ),
        (
            {"faults": [], "strategy": "dump"},
            "The job was asked to end; the job ended with a last checkpoint; no step lost.",
        ),
        (
            {"faults": [fault(kind="software")], "strategy": "exit"},
            "Rank 2 met an error of the script in step 30; the job ended without a last checkpoint.",
        ),
        (
            {"faults": [fault(kind="corruption", rank=3)], "processes_started": 0, "steps_lost": 12},
            "Rank 3 held a wrong copy of the state in step 30; repaired in the same processes in 1.43 "
            "s; 12 steps computed again.",
        ),
        (
            {"open": True, "strategy": ""},
            "Rank 2 was killed by SIGKILL in step 30; not over when this was written (no strategy was "
            "chosen yet).",
        ),
    ],
)  # fmt: skip
def test_incident_is_one_plain_sentence(changes: dict[str, Any], expected: str) -> None:
    """When an incident is told, then one sentence says what happened, what was done and the cost."""
    assert incident_sentence(incident(**{"faults": [fault()], **changes})) == expected


def test_picture_of_many_ranks_shows_those_at_fault(run_dir: Path) -> None:
    """When an incident has 10,000 ranks, then the picture has the rank at fault, and says how many
    are not shown."""
    phases = [
        {"name": "freeze", "rank": rank, "start": 0.0, "end": 0.1 + rank / 1e6}
        for rank in range(10_000)
    ]
    picture = drawn(incident(phases=phases, faults=[fault(rank=4711)]))
    assert ">rank 4711</text>" in picture
    assert ">rank 9999</text>" in picture
    assert f"{10_000 - MOST} further ranks are not shown" in picture
    assert len(picture) < 50_000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 ms"), (0.0001, "less than 1 ms"), (0.025, "25 ms"), (0.34, "0.34 s"),
        (0.999, "1.00 s"), (45.4, "45 s"), (119.6, "2 min 0 s"), (200, "3 min 20 s"),
        (7500, "2 h 5 min"), (None, "not known"),
    ],
)  # fmt: skip
def test_seconds_are_written_as_people_write_them(value: float | None, text: str) -> None:
    """When a duration is shown, then it has the unit that fits."""
    assert seconds(value) == text


def test_loss_comes_from_logged_values_if_none_was_recorded(run_dir: Path) -> None:
    """When a script logs its loss and records none, then the page has the curve of the logged one.
    The lowest rank that has logged one counts."""
    (run_dir / "records-rank0.jsonl").unlink()
    for rank, loss in ((1, 1.0), (2, 2.0)):
        (run_dir / f"values-rank{rank}.jsonl").write_text(
            "".join(
                json.dumps({"step": n, "unix": 1.5, "values": values}) + "\n"
                for n in range(1, 50)
                for values in ({"lr": 0.5}, {"loss": loss * n})
            )
        )
    losses = gather(run_dir).losses
    assert losses == tuple((n, 1.0 * n) for n in range(1, 50))


def test_records_that_cannot_be_read_are_said_and_left_out(run_dir: Path) -> None:
    """When the recorded losses of a rank cannot be read, then the page says so, and has those of the
    next rank. The same is true if the file has vanished meanwhile."""
    (run_dir / "records-rank0.jsonl").rename(run_dir / "records-rank3.jsonl")
    (run_dir / "records-rank1.jsonl").symlink_to("vanished")
    (run_dir / "records-rank2.jsonl").mkdir()
    facts = gather(run_dir)
    assert [step for step, _ in facts.losses] == list(range(1, 50))
    assert [note.removeprefix(f"{run_dir}/") for note in facts.notes] == [
        "records-rank1.jsonl cannot be read (No such file or directory)",
        "records-rank2.jsonl cannot be read (Is a directory)",
    ]
