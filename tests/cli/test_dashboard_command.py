"""
What `tft dashboard` refuses before it serves anything.
"""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tft.cli.dashboard import dashboard_command
from tft.errors import UsageError

pytest.importorskip("aiohttp")


def refusal(*words: str) -> str:
    """
    Return the sentence with which the command is refused.
    """
    done = CliRunner().invoke(dashboard_command(), words, standalone_mode=False)
    assert isinstance(done.exception, UsageError), done.output
    assert done.output == ""
    return str(done.exception)


def test_directory_without_a_job_is_refused(tmp_path: Path) -> None:
    """When the directory is none of a job, then the command says so, and serves nothing."""
    assert "no job has run in" in refusal("--run-dir", str(tmp_path))


def test_address_without_a_port_is_refused(tmp_path: Path) -> None:
    """When the address has no port, then the command says what is expected."""
    told = refusal("--run-dir", str(tmp_path), "--listen", "localhost")
    assert "--listen 'localhost' is not an address" in told


@pytest.mark.parametrize("package", ["aiohttp", "jinja2"])
def test_missing_package_is_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """When a package is missing, then the command says how to install it, and what works without."""
    monkeypatch.setitem(sys.modules, package, None)
    told = refusal("--run-dir", str(tmp_path))
    assert "pip install 'tft-bus[dashboard]'" in told
    assert "`tft top` shows a job in the terminal" in told
