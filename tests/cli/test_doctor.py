"""
`tft doctor`: what its checks find on a sound machine, and what they say of faults.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tft.cli import checks
from tft.cli.doctor import tried
from tft.keys import make_keys


def test_doctor_passes_on_a_sound_machine(tmp_path: Path) -> None:
    """When nothing is wrong, then every check is ok or a warning, a broker was tried, and nothing is
    left in the folder."""
    done = subprocess.run(
        [sys.executable, "-m", "tft", "doctor", "--adaptor", "fake", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    told = json.loads(done.stdout)
    assert (done.returncode, told["failed"]) == (0, 0), done.stdout
    found = {each["check"]: each for each in told["checks"]}
    assert found["broker"]["text"].startswith("started for this check: 127.0.0.1:")
    assert [*tmp_path.iterdir()] == []


def test_keys_that_others_can_read_fail(tmp_path: Path) -> None:
    """When other users can read a key, then the check fails and says what to do. Whole keys are
    tried with an encrypted broker."""
    keys = tmp_path / "keys"
    make_keys(keys)
    assert checks.keys(keys).result == "ok"
    assert "encrypted" in checks.own_broker(keys).text
    (keys / "broker.key").unlink()
    assert checks.keys(keys).result == "warning"
    (keys / "job.key").chmod(0o644)
    found = checks.keys(keys)

    assert (found.result, "chmod 600" in found.text) == ("failed", True)


def test_broker_that_does_not_start_fails_with_its_reason(tmp_path: Path) -> None:
    """When the broker of the check refuses to start, then the finding has its reason."""
    found = checks.own_broker(tmp_path / "no-keys")

    assert found.result == "failed"
    assert "a broker does not start: tft: --curve" in found.text


def test_broker_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """When no broker listens at the address, then the check fails after its limit, and says what to
    look at."""
    monkeypatch.setattr(checks, "_ANSWER", 0.2)
    found = checks.broker("127.0.0.1:1", None)

    assert found.result == "failed"
    assert "check that it runs" in found.text


def test_broker_with_keys_is_reported_to_a_command_without(tmp_path: Path) -> None:
    """When a broker uses keys, and the command has none, then the finding says so."""
    make_keys(tmp_path / "keys")
    with checks.started_broker(tmp_path / "keys") as address:
        found = checks.broker(address, None)

    assert (found.result, "--curve" in found.text) == ("failed", True)


def test_directory_that_cannot_be_written_fails(tmp_path: Path) -> None:
    """When the run directory is a file, or lies on a file system that takes no files, then the
    check fails."""
    (tmp_path / "file").touch()

    assert checks.run_directory(tmp_path / "file").result == "failed"
    assert checks.run_directory(Path("/proc/run")).result == "failed"
    assert checks.run_directory(tmp_path / "runs" / "a").result in ("ok", "warning")
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_check_that_fails_in_an_unforeseen_way_is_a_finding() -> None:
    """When a check raises an exception, then it has failed, with this reason."""
    found = tried("ports", Path("no-such-file").read_text)  # type: ignore[arg-type] # raises

    assert (found.check, found.result) == ("ports", "failed")
    assert found.text.startswith("cannot be checked: FileNotFoundError: ")


def test_adaptor_without_its_framework_fails() -> None:
    """When an adaptor is not installed, then the check names those that are."""
    found = checks.adaptor("abacus")

    assert found.result == "failed"
    assert "no installed package provides an adaptor named 'abacus'" in found.text
