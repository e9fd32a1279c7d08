"""
The examples as a new user meets them: installed into a fresh environment, and run with the commands
of their pages. The commands are read from the pages, so a wrong page fails here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.jobs import MARK, ROOT, left_behind, until

EXAMPLES = ROOT / "examples"
PACKAGES = ("numpy_adaptor[test]", "observer", "recovery_plugin[test]", "by_hand")
"""The examples that are packages of their own. None of them needs torch."""
LIMIT = 60.0
"""Seconds that all commands of a page may take."""
_COMMANDS = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """
    A page and the output of its commands.
    """

    code: int
    output: str
    directory: Path
    """Where the commands were typed."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """
    Return the environment variables of a user who has made and activated a virtual environment, and
    installed tft and the examples.
    """
    place = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(place, symlinks=True)
    install = [
        sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install",
        "--quiet", "--disable-pip-version-check",
    ]  # fmt: skip
    packages = [str(ROOT), *(str(EXAMPLES / name) for name in PACKAGES)]
    # one build backend for all packages: pip would make an environment with it for each
    for what in (["hatchling"], ["--no-build-isolation", *packages]):
        done = subprocess.run(
            [*install, *what], capture_output=True, text=True, timeout=100.0, check=False
        )
        assert done.returncode == 0, done.stderr
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("TFT_", "PYTHON", "OMP_"))
    }
    return {**kept, "PATH": f"{place / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(place)}


def typed(example: str, directory: Path, environment: Mapping[str, str]) -> Page:
    """
    Run the commands of a page one after another, until one fails. `directory` replaces the root of
    the checkout. Processes that are left at the end are killed by pid.
    """
    commands = _COMMANDS.findall((EXAMPLES / example / "README.md").read_text())
    assert commands, f"the page of {example} has no commands"
    (directory / "examples").symlink_to(EXAMPLES)
    log = directory / "output"
    with log.open("w") as out:
        process = subprocess.Popen(
            ["bash", "-euxo", "pipefail", "-c", "\n".join(commands)],
            cwd=directory, env={**environment, MARK: str(directory)},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        code = process.wait(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # the fork server of a contract suite ends only after pytest has closed its pipe
        with suppress(AssertionError):
            until(lambda: not left_behind(directory), "the end of all processes", 5.0)
        left = left_behind(directory)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    page = Page(code=code, output=log.read_text(errors="replace"), directory=directory)
    assert code == 0, page.output
    assert left == [], "processes were left behind"
    return page


@pytest.mark.soak
def test_examples_do_not_install_torch(environment: Mapping[str, str]) -> None:
    """When tft and the examples are installed, then torch is not installed, and tft can be
    imported."""
    script = "import tft, importlib.util; print(importlib.util.find_spec('torch'), tft.__file__)"
    said = subprocess.run(
        ["python", "-c", script],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.startswith(f"None {environment['VIRTUAL_ENV']}")


def test_an_adaptor_for_a_framework_of_arrays_survives_a_kill_and_a_resume(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """
    When a rank of the numpy example is killed, or its job is resumed from a last checkpoint, then
    all losses and the final state are those of the undisturbed run. The contract suite passes.
    """
    page = typed("numpy_adaptor", tmp_path, environment)
    assert page.output.count("losses of 4 ranks: bit-identical") == 2
    assert page.output.count("final state of 4 ranks: bit-identical") == 2
    assert "incident: process at rank 2; recover in " in page.output
    assert "incident: process at rank 2; dump in " in page.output
    assert "16 passed" in page.output


def test_an_observer_writes_what_happens_and_may_fail(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """
    When a job is watched, then the observer's file has every event of an incident; when the
    observer's disk is full, then the failures are logged, fewer the more there are. Either way the losses and the
    final state are those of a job that nobody watches.
    """
    page = typed("observer", tmp_path, environment)
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "state"] == [
        "leads", "node_joined", "rank_gone", "fault", "stopped", "strategy_chosen",
        "incident_closed", "job_ends",
    ]  # fmt: skip
    assert all("at" in line for line in lines)
    assert page.output.count("final state of 4 ranks: bit-identical") == 2
    assert page.output.count("incident: process at rank 2; recover in ") == 2
    # each time that the number of failures doubles is a line of the log
    assert page.output.rstrip().endswith(f"\n{len(lines).bit_length()}")


def test_a_recovery_plugin_ends_the_job_at_the_third_loss(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """
    When a rank is lost for the third time, then the plugin has the job end with a last checkpoint,
    from which it goes on to the state of the undisturbed run. The plugin's own tests pass.
    """
    page = typed("recovery_plugin", tmp_path, environment)
    assert "4 passed" in page.output
    assert (
        "not recover: a recovery plugin has advised another strategy: rank 2 has lost its process "
        "3 times" in page.output
    )
    assert "losses of 4 ranks: bit-identical" in page.output
    assert "final state of 4 ranks: bit-identical" in page.output
    assert page.output.count("incident: process at rank 2; recover in ") == 2
    assert page.output.count("incident: process at rank 2; dump in ") == 1


@pytest.mark.soak
def test_a_job_whose_parts_are_started_by_hand_survives_their_deaths(
    tmp_path: Path, environment: Mapping[str, str]
) -> None:
    """
    When a rank, the controller and the broker of such a job are killed, then it completes with the
    losses and the final state of one that was left alone, and it can be paused.
    """
    page = typed("by_hand", tmp_path, environment)
    assert "the job stands still" in page.output
    assert "the job goes on" in page.output
    assert page.output.rstrip().endswith("losses and final state of 4 ranks: bit-identical")
    report = json.loads((tmp_path / "runs" / "by-hand" / "report.json").read_text())
    [incident] = report["incidents"]
    assert incident["strategy"] == "recover"
    assert [fault["rank"] for fault in incident["faults"]] == [2]
