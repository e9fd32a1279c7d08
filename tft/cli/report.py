"""
`tft report`: writes a page about a job from the records in its run directory.
"""

import json
from pathlib import Path

import click

from tft.errors import UsageError
from tft.files import write_whole
from tft.report.facts import gather
from tft.report.html import html
from tft.report.markdown import markdown
from tft.report.summary import summary

PAGE = "report.html"
PRINTED = Path("-")
"""The file name that stands for the standard output."""


def report_command() -> click.Command:
    """
    Return the command `tft report`.
    """

    def report(
        run_dir: Path,
        out: Path | None,
        page: Path | None,
        text: Path | None,
        as_json: bool,
    ) -> int:
        _check_one_is_printed(page, text, as_json=as_json)
        facts = gather(run_dir)
        plain = json.dumps(summary(facts), indent=1, default=str) + "\n"
        files: dict[Path, str] = {}
        if out is not None:
            _make(out)
            files = {out / PAGE: html(facts), out / "report.md": markdown(facts)}
            files[out / "summary.json"] = plain
        if page is not None or not (out or text or as_json):
            files[page or run_dir / PAGE] = html(facts)
        if text is not None:
            files[text] = markdown(facts)
        for path, content in files.items():
            _write(path, content)
        if as_json:
            click.echo(plain, nl=False)
        return 0

    return click.Command(
        "report",
        callback=report,
        params=[
            click.Argument(["run_dir"], type=click.Path(path_type=Path)),
            click.Option(
                ["--out", "out"],
                metavar="DIR",
                type=click.Path(path_type=Path),
                help="Write report.html, report.md and summary.json into DIR.",
            ),
            click.Option(
                ["--html", "page"],
                metavar="FILE",
                type=click.Path(path_type=Path),
                help="Write the page to FILE (-: print it); without an option: report.html in RUN_DIR.",
            ),
            click.Option(
                ["--markdown", "text"],
                metavar="FILE",
                type=click.Path(path_type=Path),
                help="Write the report as Markdown to FILE (-: print it).",
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the report as JSON."),
        ],
        help=(
            "Write a page about the job in RUN_DIR: how it ended, how its time was spent, and each "
            "incident. The job may be over, may still run, or may have been killed."
        ),
    )


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as refused:
        raise UsageError(f"{directory} cannot be made: {refused.strerror}") from None


def _check_one_is_printed(page: Path | None, text: Path | None, *, as_json: bool) -> None:
    if [page == PRINTED, text == PRINTED, as_json].count(True) > 1:
        raise UsageError("only one of --html -, --markdown - and --json can be printed")


def _write(path: Path, content: str) -> None:
    """
    Write a file and say where it is, or print its content.
    """
    if path == PRINTED:
        click.echo(content, nl=False)
        return
    try:
        write_whole(path, content)
    except OSError as refused:
        raise UsageError(f"{path} cannot be written: {refused.strerror}") from None
    click.echo(f"tft: the report is in {path}", err=True)
