"""
`tft doctor`: checks a machine, an installation and a broker before a job is started, or while one
runs. The checks are in `tft.cli.checks`.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import click

from tft.cli import checks
from tft.cli.checks import Finding
from tft.errors import UsageError
from tft.launcher.records import Records, read_records

_PROBLEM = 1
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red"}


def doctor_command() -> click.Command:
    """
    Return the command `tft doctor`.
    """

    def doctor(
        run_dir: Path | None,
        broker: str | None,
        curve: Path | None,
        adaptor: str | None,
        as_json: bool,
    ) -> int:
        found = []
        for each in _findings(run_dir, broker, curve, adaptor):
            found.append(each)
            if not as_json:
                mark = click.style(f"{each.result:<8}", fg=_COLOURS[each.result])
                click.echo(f"{mark} {each.check:<14} {each.text}")
        failed = sum(each.result == "failed" for each in found)
        warned = sum(each.result == "warning" for each in found)
        if as_json:
            listed = [asdict(each) for each in found]
            click.echo(
                json.dumps({"failed": failed, "warnings": warned, "checks": listed}, indent=1)
            )
        else:
            click.echo(f"{len(found)} checks: {failed} failed, {warned} warnings")
        return _PROBLEM if failed else 0

    return click.Command(
        "doctor",
        callback=doctor,
        params=[
            click.Option(
                ["--run-dir"],
                type=click.Path(path_type=Path),
                help="A run directory: of a running job, or one that a job is to use.",
            ),
            click.Option(
                ["--broker"], metavar="HOST:PORT", help="Check this broker, not one of its own."
            ),
            click.Option(
                ["--curve"],
                type=click.Path(path_type=Path),
                help="The directory with the keys of the job.",
            ),
            click.Option(
                ["--adaptor"], metavar="NAME", help="The adaptor to import with its framework."
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the findings as JSON."),
        ],
        help="Check this machine and this installation: a line for each check, and what to do."
        "\n\nExits with 1 if something failed.",
    )


def _findings(
    run_dir: Path | None, broker: str | None, curve: Path | None, adaptor: str | None
) -> Iterator[Finding]:
    records: Records | None = None
    if run_dir is not None:
        with suppress(UsageError):  # a job is still to be started there
            records = read_records(run_dir)
    live = records if records is not None and records.result == "running" else None
    if records is not None:
        curve = curve or records.there.curve
        adaptor = adaptor or str(records.settings.get("adaptor", "pytorch"))
    yield checks.versions()
    yield checks.packages()
    yield checks.open_files()
    yield checks.processes()
    yield checks.monotonic_clock()
    yield checks.shared_memory()
    yield checks.dev_shm()
    yield checks.run_directory(run_dir or Path("tft-runs"))
    if curve is not None:
        keys = checks.keys(curve)
        yield keys
        if keys.result == "failed":
            curve = None  # the broker is checked without them
    yield checks.loopback()
    address = broker or (live.there.broker if live is not None else None)
    if address is not None:
        yield checks.broker(address, curve)
    else:
        yield checks.own_broker(curve)
    yield from checks.plugins()
    yield checks.adaptor(adaptor or "pytorch")
