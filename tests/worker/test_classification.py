"""
The fault kind that a session gives to an exception if its adaptor does not classify the exception.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tft.config import RankSettings
from tft.page import Page
from tft.worker.session import Session


def test_adaptor_error_does_not_replace_the_fault_of_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """When the adaptor raises while it classifies an exception, then the exception of the script is
    the reported fault."""

    def fails(error: BaseException) -> None:
        raise RuntimeError("no such attribute") from error

    page = Page.create()
    session = Session(
        RankSettings(
            rank=0, world=1, job="j", run_dir=tmp_path, broker="127.0.0.1:1", adaptor="fake",
            incarnation=0, page=page.fd, host="127.0.0.1",
        )
    )  # fmt: skip
    hook = SimpleNamespace(tft_classify=fails)
    monkeypatch.setattr(session._faults, "_hook", hook)
    fault = session._faults.report(ValueError("the label is negative"))
    assert (fault.kind, fault.summary) == ("software", "ValueError: the label is negative")
