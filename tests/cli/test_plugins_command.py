"""
`tft plugins`: what it lists, and what it says of extensions that cannot be used.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.agent.stage import package
from tft.plugins import ADAPTORS, PLUGINS, extensions


def test_broken_plugin_is_listed_with_the_reason(tmp_path: Path) -> None:
    """When a plugin cannot be imported, and another one has a hook that tft does not have, then both
    are listed with the reason, and the exit code is 1."""
    package(tmp_path, "torn", "import no_such_module", "tft.plugins")
    hook = "from tft.spi import hookimpl\n@hookimpl\ndef tft_nonsense(): pass\n"
    package(tmp_path, "stranger", hook, "tft.plugins")
    done = subprocess.run(
        [sys.executable, "-m", "tft", "plugins"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip

    text = " ".join(done.stdout.split())
    assert done.returncode == 1, done.stderr
    assert (
        "torn: torn, of torn 1.0 CANNOT BE USED: its import fails: ModuleNotFoundError: No module "
        "named 'no_such_module' so: jobs run without this plugin, or are refused"
    ) in text
    assert (
        "stranger: stranger, of stranger 1.0 CANNOT BE USED: the adaptor, plugin or object" in text
    )
    assert "options of tft run: --chaos" in text


def test_incomplete_adaptor_is_listed_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an adaptor lacks required hooks, then they are named. A complete one has no problem."""
    monkeypatch.syspath_prepend(str(tmp_path))
    hook = "from tft.spi import hookimpl\n@hookimpl\ndef tft_strategies(): return ['dump']\n"
    package(tmp_path, "half_an_adaptor", hook, "tft.adaptors")
    found = {each.name: each for each in extensions([ADAPTORS])}

    half = found["half_an_adaptor"]
    assert half.hooks == ("tft_strategies",)
    assert "tft_rollback" in half.missing
    assert "lacks hooks that it must have" in half.problem
    assert (found["fake"].problem, found["fake"].missing) == ("", ())


def test_plugins_are_listed_with_their_options() -> None:
    """When a plugin adds options to `tft run`, then they are listed with its hooks and package."""
    [chaos] = [each for each in extensions([PLUGINS]) if each.name == "chaos"]

    assert (chaos.value, chaos.package, chaos.options) == ("tft_chaos", "tft-bus", ("--chaos",))
    assert "tft_options" in chaos.hooks
