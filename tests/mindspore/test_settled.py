"""
Tests of the value of `MS_ENABLE_TFT` that MindSpore reads, before and after tft has settled the
variable.
"""

import os
import subprocess
import sys

import pytest

SETTLED = """
from tft_mindspore.environment import settle
settle()
"""
IMPORTED = """
import os
from mindspore.utils.utils import TFTCommValue
print([each for each in TFTCommValue.NEED_MINDIO if each in os.environ["MS_ENABLE_TFT"]])
"""


def run(script: str, text: str) -> subprocess.CompletedProcess[str]:
    """
    Run a Python script with `MS_ENABLE_TFT` set to `text`.
    """
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "MS_ENABLE_TFT": text, "GLOG_v": "3"},
    )


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        pytest.param("{ ttp : 1 }", "[]", "['TTP:1']", marks=pytest.mark.soak),
        pytest.param("{UCE:1}", "['UCE:1']", "['TTP:1', 'UCE:1']", marks=pytest.mark.soak),
        pytest.param("{NEW:a:1, uce:1}", "[]", "['TTP:1', 'UCE:1']", marks=pytest.mark.soak),
    ],
)
def test_mindspore_enables_the_intended_strategies(text: str, before: str, after: str) -> None:
    """When the environment is settled before MindSpore is imported, then MindSpore enables the
    intended strategies. Without tft, MindSpore would read the text differently."""
    for script, expected in ((IMPORTED, before), (SETTLED + IMPORTED, after)):
        ended = run(script, text)
        assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, expected), ended.stderr


def test_tft_reports_an_invalid_item_before_mindspore_aborts() -> None:
    """When MindSpore would abort the interpreter over an item, then tft's message comes first."""
    aborted = run(IMPORTED, "{TTP}")
    assert aborted.returncode != 0
    assert "IndexError" in aborted.stderr
    refused = run(SETTLED + IMPORTED, "{TTP}")
    assert refused.returncode == 1
    assert "'TTP' has no value: write TTP:1 or TTP:0" in refused.stderr
    assert "IndexError" not in refused.stderr
