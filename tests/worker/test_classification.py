"""
The fault reports that a session makes from exceptions.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tft.config import RankSettings
from tft.page import Page
from tft.spi.faults import TrainingFault
from tft.worker.session import Session

LOST = RuntimeError("CUDA error: device-side assert triggered")


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """
    Return a session that has not joined a job.
    """
    page = Page.create()
    return Session(
        RankSettings(
            rank=0, world=1, job="j", run_dir=tmp_path, broker="127.0.0.1:1", adaptor="fake",
            incarnation=0, page=page.fd, host="127.0.0.1",
        )
    )  # fmt: skip


def test_adaptor_error_does_not_replace_the_fault_of_the_script(
    monkeypatch: pytest.MonkeyPatch, session: Session
) -> None:
    """When the adaptor raises while it classifies an exception, then the exception of the script is
    the reported fault."""

    def fails(error: BaseException) -> None:
        raise RuntimeError("no such attribute") from error

    hook = SimpleNamespace(tft_classify=fails)
    monkeypatch.setattr(session._faults, "_hook", hook)
    fault = session._faults.report(ValueError("the label is negative"))
    assert (fault.kind, fault.summary) == ("software", "ValueError: the label is negative")


def test_second_failure_does_not_replace_the_fault_of_the_script(session: Session) -> None:
    """When a rank fails again as it leaves its loop, then its first failure is reported. If the
    second one shows that the device context is lost, then the report says so."""
    faults = session._faults
    first = faults.report(ValueError("the label is negative"))
    assert faults.also(first, KeyError("no position")) == first
    both = faults.also(first, LOST)
    assert (both.summary, both.kind, both.context_lost) == (first.summary, "software", True)


def test_lost_device_is_reported_instead_of_the_broken_connection_that_it_caused(
    session: Session,
) -> None:
    """When a rank has left its loop because of a broken connection, or without a failure, and its
    device context turns out to be lost, then this is the reported fault."""
    faults = session._faults
    broken = faults.report(TrainingFault("the peer is gone", kind="network"))
    for first in (broken, None):
        found = faults.also(first, LOST)
        assert (found.kind, found.context_lost) == ("software", True)
        assert "device-side assert" in found.summary


def test_interrupted_rank_whose_state_cannot_be_read_ends(session: Session) -> None:
    """When a rank was interrupted without a failure of its own, and an object of the script raises
    as it is captured, then the exception is passed on: another process takes the place of the rank.
    """
    with pytest.raises(KeyError, match="no position"):
        session._faults.also(None, KeyError("no position"))
