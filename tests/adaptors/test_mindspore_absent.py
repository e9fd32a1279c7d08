"""
A machine without MindSpore: a script that needs the package gets instructions, and all other
scripts work.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT, run

pytestmark = pytest.mark.skipif(find_spec("mindspore") is not None, reason="MindSpore is here")


def test_mindspore_adaptor_without_mindspore_names_the_package(tmp_path: Path) -> None:
    """When a job uses the adaptor mindspore and MindSpore is not installed, then the job exits with
    4 and names the package to install."""
    script = ROOT / "examples" / "mindspore_mlp" / "train.py"
    outcome = run(tmp_path / "run", "--adaptor", "mindspore", script=script, nproc=1)

    assert outcome.code == 4
    assert "pip install 'tft-bus[mindspore]'" in outcome.output
    assert "Traceback" not in outcome.output
