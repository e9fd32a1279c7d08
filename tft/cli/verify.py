"""
`tft verify`: shows whether a script computes bit-identical results although ranks are killed.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tft.errors import UsageError
from tft.launcher.options import Names

_HELP = """
Run SCRIPT for a few steps undisturbed, then with a rank killed in each phase, and compare losses,
batches and the whole state of every rank.

Exit code 0: everything is identical. 1: something differs. 2: nothing can be said, or the script was
refused. The script runs several times: give it a directory of its own if it writes files.
"""

_PAGE = "docs/reference/verify.md"


def verify_command() -> click.Command:
    """
    Return the command `tft verify`.
    """
    return click.Command(
        "verify",
        callback=_verify,
        params=[
            click.Option(
                ["--nproc-per-node"], type=click.IntRange(min=2), default=2, show_default=True,
                help="How many ranks the job has. Ranks are killed in turn.",
            ),
            click.Option(
                ["--adaptor"], default="pytorch", show_default=True,
                help="The adaptor for the job's framework, as for `tft run`.",
            ),
            click.Option(
                ["--steps"], type=click.IntRange(min=4), default=None,
                help="How many steps each job trains at most; by default enough for all phases.",
            ),
            click.Option(
                ["--phases"], type=Names(), default=None,
                help="The phases in which a rank is killed; by default all.",
            ),
            click.Option(
                ["--audit"], default="first",
                show_default=True, help="The audit of the jobs, as for `tft run`.",
            ),
            click.Option(
                ["--limit"], type=click.IntRange(min=1), default=600, show_default=True,
                metavar="SECONDS", help="The time for all jobs together.",
            ),
            click.Option(
                ["--run-dir"], type=click.Path(path_type=Path), default=None,
                help="A new directory for the records of the jobs; by default one in `tft-runs/`.",
            ),
            click.Option(["--json", "as_json"], is_flag=True, help="Print the report as JSON."),
            click.Option(
                ["--module", "-m"], is_flag=True,
                help="SCRIPT is the name of a module, and is run as `python -m` runs it.",
            ),
            click.Argument(["script"]),
            click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, metavar="[ARGS]..."),
        ],
        context_settings={"allow_interspersed_args": False, "max_content_width": 100},
        help=_HELP,
    )  # fmt: skip


def _verify(**options: Any) -> int:  # Any: the options have different types
    from tft.launcher.run_directory import new_run_dir
    from tft.verify.schedule import PHASES, steps_for
    from tft.verify.verification import Verifier

    unknown = [phase for phase in options["phases"] or () if phase not in PHASES]
    if unknown:
        raise UsageError(
            f"--phases does not know {', '.join(unknown)}; the phases of a step are "
            f"{', '.join(PHASES)}"
        )
    phases = [phase for phase in PHASES if phase in (options["phases"] or PHASES)]
    if not options["module"] and not Path(options["script"]).is_file():
        raise UsageError(f"the script {options['script']} does not exist")
    directory = _made((options["run_dir"] or new_run_dir()).absolute())
    printer = _Printer(quiet=options["as_json"])
    steps = options["steps"] or steps_for(phases)
    printer.say(
        f"tft verify: {options['nproc_per_node']} ranks, at most {steps} steps, in {directory}"
    )
    started = ["-m", options["script"]] if options["module"] else [options["script"]]
    verifier = Verifier(
        directory=directory,
        options=["--adaptor", options["adaptor"], "--audit", options["audit"]],
        command=[*started, *options["arguments"]],
        ranks=options["nproc_per_node"],
        steps=steps,
        limit=options["limit"],
        told=printer.found,
        began=printer.began,
    )
    result = verifier.verify(phases)
    report = _report(result)
    (directory / "verify.json").write_text(json.dumps(report, indent=2) + "\n")
    if options["as_json"]:
        click.echo(json.dumps(report, indent=2))
    printer.ended(result)
    return 0 if result.identical else 1


def _made(directory: Path) -> Path:
    """
    Make the directory for the records of the jobs, and return it. Raises `UsageError` if it cannot
    be made, or if it has files already.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"--run-dir {directory} is not a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        full = any(directory.iterdir())
    except OSError as error:
        raise UsageError(f"--run-dir {directory} cannot be used: {error.strerror}") from None
    if full:
        raise UsageError(f"--run-dir {directory} is not empty: name a new directory")
    return directory


# Any: a `Verification`, whose module is imported only when it is used
def _report(result: Any) -> dict[str, object]:
    return {
        "verdict": "identical" if result.identical else "differs",
        "ranks": result.ranks,
        "steps": result.steps,
        "ignored": list(result.ignored),
        "unrecorded": list(result.unrecorded),
        "phases": [
            {
                "phase": each.phase,
                "result": each.result,
                "kill": each.kill and asdict(each.kill),
                "killed": each.killed,
                "difference": each.difference
                and {
                    **asdict(each.difference),
                    "sentence": each.difference.sentence(),
                    "section": _section(each.difference.kind),
                },
                "why": each.why,
                "inexact": list(each.inexact),
                "run_dir": each.run_dir and str(each.run_dir),
            }
            for each in result.findings
        ],
    }


class _Printer:
    """
    Prints the progress and the findings as lines for the operator. With `quiet` it prints nothing.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, line: str) -> None:
        """
        Print a line, unless this printer is quiet because the report is printed as JSON.
        """
        if not self._quiet:
            click.echo(line)

    # Any: `Ended` and `Digests`, whose modules are imported only when they are used
    def began(self, ended: Any, digests: Any) -> None:
        """
        Print that the first undisturbed job has ended, with its number of steps and its time.
        """
        self.say(f"  {'undisturbed':<12} {digests.last} steps in {ended.seconds:.1f} s")

    # Any: a `Finding`, whose module is imported only when it is used
    def found(self, finding: Any) -> None:
        """
        Print the result for one phase. If a difference was found, also print the difference and the
        page that describes its usual causes.
        """
        self.say(f"  {finding.phase:<12} {finding.result}{_where(finding)}")
        if finding.difference is not None:
            self.say(f"    {finding.difference.sentence()}")
            self.say(f"    usual causes: {_section(finding.difference.kind)}")
        for line in finding.why.splitlines():
            self.say(f"    {line}")
        for sentence in finding.inexact:
            self.say(f"    the job itself reports: {sentence}")
        if finding.result == "differs":
            self.say(f"    records: {finding.run_dir}")

    # Any: a `Verification`, whose module is imported only when it is used
    def ended(self, result: Any) -> None:
        """
        Print whether the runs with kills computed the same as the undisturbed run. Also print which
        values of `session.record` were ignored.
        """
        if result.ignored:
            self.say(
                f"not compared: {', '.join(result.ignored)} in the rows of session.record, which "
                "differs between two undisturbed runs"
            )
        differ = [each for each in result.tried if each.result == "differs"]
        changed = [each.phase for each in differ if each.killed and each.difference is not None]
        failed = [each.phase for each in differ if each.phase not in changed]
        if changed:
            self.say(f"differs: a rank killed in {', '.join(changed)} changes the training")
        if failed:
            self.say(f"differs: the job for {', '.join(failed)} failed or did not end in time")
        if result.identical:
            shown = [kind for kind in ("losses", "batches") if kind not in result.unrecorded]
            what = " and ".join([*filter(None, [", ".join(shown)]), "the state"])
            self.say(
                f"identical: {what} of {result.ranks} ranks over "
                f"{result.steps} steps, with a rank killed in {len(result.tried)} phases"
            )
            if result.unrecorded:
                self.say(
                    f"not compared: {' and '.join(result.unrecorded)}, of which nothing is known"
                )


# Any: a `Finding`, whose module is imported only when it is used
def _where(finding: Any) -> str:
    """
    Return a text that says which rank was killed in which step, or was to be killed when the job
    failed. It is empty if the phase was not tried.
    """
    if finding.result == "not tried" or finding.kill is None:
        return ""
    victim = f"rank {finding.kill.rank}"
    if finding.killed:
        return f" ({victim} killed in step {finding.kill.step})"
    return f" (before {victim} was killed in step {finding.kill.step})"


def _section(kind: str) -> str:
    return f"{_PAGE}#{kind}"
