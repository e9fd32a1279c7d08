"""
A machine without megatron-core: a script that needs the package gets instructions, and all other
scripts work.
"""

import os
from pathlib import Path

import pytest

from tests.e2e.jobs import run


@pytest.fixture
def without_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Put a package `megatron` without `core` on the PYTHONPATH of the processes that the test starts.
    """
    place = tmp_path / "other"
    (place / "megatron").mkdir(parents=True)
    (place / "megatron" / "__init__.py").touch()
    known = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", f"{place}:{known}" if known else str(place))


@pytest.mark.soak
@pytest.mark.usefixtures("without_megatron")
def test_megatron_adaptor_without_megatron_core_names_the_package(tmp_path: Path) -> None:
    """When a job uses the adaptor megatron and megatron-core is not installed, then the job exits
    with 4 and names the package to install."""
    script = tmp_path / "train.py"
    script.write_text("import tft\n\ntft.init()\n")
    outcome = run(tmp_path / "run", "--adaptor", "megatron", script=script, nproc=1)

    assert outcome.code == 4
    assert "pip install 'tft-bus[megatron]'" in outcome.output
    assert "Traceback" not in outcome.output


@pytest.mark.usefixtures("without_megatron")
def test_other_adaptor_works_without_megatron_core(tmp_path: Path) -> None:
    """When a job uses another adaptor, then the job does not need megatron-core."""
    script = tmp_path / "train.py"
    script.write_text('import tft\n\nprint("adaptor", tft.init().adaptor)\n')
    outcome = run(tmp_path / "run", "--adaptor", "fake", script=script, nproc=1)

    assert "adaptor fake" in outcome.output, outcome.output
    assert "megatron" not in outcome.output.replace(str(tmp_path), "")
