"""
`tft doctor`: checks a machine, an installation and a broker before a job is started, or while a job
runs. The checks are in `tft.cli.checks`.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import ParamSpec

import click

from tft.cli import checks
from tft.cli.checks import Finding
from tft.errors import UsageError
from tft.launcher.records import Records, read_records

P = ParamSpec("P")

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
        for each in findings(run_dir, broker, curve, adaptor):
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
            click.echo(f"{len(found)} checks: {failed} failed, {warned} with a warning")
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


def findings(
    run_dir: Path | None, broker: str | None, curve: Path | None, adaptor: str | None
) -> Iterator[Finding]:
    """
    Run the checks one after another, and yield their findings. The arguments are the options of
    `tft doctor`.
    """
    records: Records | None = None
    if run_dir is not None:
        with suppress(UsageError):  # no job was started in this directory yet
            records = read_records(run_dir)
    live = records if records is not None and records.result == "running" else None
    if records is not None:
        curve = curve or records.there.curve
        adaptor = adaptor or str(records.settings.get("adaptor", "pytorch"))
    yield tried("versions", checks.versions)
    yield tried("packages", checks.packages)
    yield tried("open files", checks.open_files)
    yield tried("processes", checks.processes)
    yield tried("clock", checks.monotonic_clock)
    yield tried("shared memory", checks.shared_memory)
    yield tried("/dev/shm", checks.dev_shm)
    yield tried("run directory", checks.run_directory, run_dir or Path("tft-runs"))
    own_keys = None
    if curve is not None:
        keys = tried("keys", checks.keys, curve)
        yield keys
        # If the keys cannot be used, check a broker without keys. If only the key of a broker is
        # missing (a warning), start the broker of this machine without keys.
        own_keys = curve if keys.result == "ok" else None
        curve = None if keys.result == "failed" else curve
    yield tried("ports", checks.loopback)
    address = broker or (live.there.broker if live is not None else None)
    if address is not None:
        yield tried("broker", checks.broker, address, curve)
    else:
        yield tried("broker", checks.own_broker, own_keys)
    yield from checks.plugins()
    yield tried("adaptor", checks.adaptor, adaptor or "pytorch")


def tried(name: str, check: Callable[P, Finding], *what: P.args, **how: P.kwargs) -> Finding:
    """
    Run a check, and return its finding. If the check raises an unexpected exception, return a
    failed finding, so that the operator still gets the findings of the other checks.
    """
    try:
        return check(*what, **how)
    except Exception as error:  # noqa: BLE001 # see above
        return checks.failed(name, f"cannot be checked: {type(error).__name__}: {error}")
