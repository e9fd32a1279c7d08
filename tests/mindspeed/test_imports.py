"""
Tests of MindSpeed-LLM's own files over `mindio_ttp`: their imports exist, and their own tests pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.jobs import ROOT
from tests.mindspeed import llm
from tests.mindspeed.jobs import SOURCE

pytestmark = pytest.mark.skipif(
    not SOURCE, reason="MINDSPEED_LLM names no directory of MindSpeed-LLM"
)

LEFT_OUT: dict[str, str] = {}
"""Tests of MindSpeed-LLM that are not run, each with the reason."""


def _run(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """
    Run Python with the stand-ins; write no bytecode into MindSpeed-LLM's directory.
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_all_high_availability_modules_can_be_imported(tmp_path: Path) -> None:
    """When every module of MindSpeed-LLM's high availability is imported, then each name that it
    takes from `mindio_ttp` exists."""
    modules = llm.modules(SOURCE)
    assert len(modules) > 15
    code = f"from tests.mindspeed import upstream; import importlib; [importlib.import_module(m) for m in {modules}]"
    done = _run(tmp_path, "-c", code)
    assert done.returncode == 0, done.stdout[-4000:]


def test_mindspeed_llms_own_tests_pass(tmp_path: Path) -> None:
    """When MindSpeed-LLM's unit tests of its high availability are run, then all pass except those
    on the exclusion list."""
    files = sorted(Path(SOURCE).glob("tests/**/test_elastic_training_*.py"))
    assert files
    left_out = [word for name in LEFT_OUT for word in ("--deselect", name)]
    done = _run(
        tmp_path,
        "-m", "pytest", "-q", "-p", "tests.mindspeed.upstream", "-p", "no:cacheprovider",
        "--import-mode=importlib", *left_out, *map(str, files),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    assert re.search(r"\d\d passed", done.stdout)
