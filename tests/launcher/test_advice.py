"""
A script that was not protected is told which package protects its framework.
"""

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from tft.launcher import advice as module
from tft.launcher.advice import FRAMEWORKS, advice


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Register two frameworks. The package of the second one cannot be imported.
    """
    found = EntryPoints(
        [
            EntryPoint("lightning", "tft_lightning.advice:ADVICE", FRAMEWORKS),
            EntryPoint("stranger", "there.is.no:SUCH", FRAMEWORKS),
        ]
    )
    monkeypatch.setattr(module, "entry_points", lambda group: found)


@pytest.mark.parametrize(
    "line",
    ["import lightning as L", "from lightning.pytorch import Trainer", "    import lightning"],
)
def test_a_script_that_imports_a_framework_is_told_the_package(tmp_path: Path, line: str) -> None:
    """When a script imports Lightning, then it is told how to make it fault tolerant."""
    script = tmp_path / "train.py"
    script.write_text(f"import sys\n{line}\n")
    (sentence,) = advice(script)
    assert sentence.startswith("train.py imports lightning: ")
    assert "TftStrategy" in sentence


@pytest.mark.parametrize(
    "text",
    [
        "import torch", "import lightning_utilities", "# import lightning", "import stranger",
        "import lightning\nfrom tft_lightning import TftStrategy",
    ],
)  # fmt: skip
def test_other_scripts_get_no_advice(tmp_path: Path, text: str) -> None:
    """When a script imports no framework that a package can protect, or imports that package, then
    nothing is said."""
    script = tmp_path / "train.py"
    script.write_text(text)
    assert advice(script) == []


def test_a_script_that_cannot_be_read_gets_no_advice(tmp_path: Path) -> None:
    """When there is no such file, as with `-m`, then nothing is said."""
    assert advice(tmp_path / "missing.py") == []
