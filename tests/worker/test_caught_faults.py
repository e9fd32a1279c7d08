"""
Scripts that catch the exception of a collective before the update window, and continue.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pluggy
import pytest

from tft.config import RankSettings
from tft.errors import Interrupted
from tft.page import Page
from tft.spi import TrainingFault
from tft.spi.adaptor import AdaptorSpecs
from tft.testing import adaptor as fake
from tft.worker import session
from tft.worker.session import Session


class Collectives:
    """
    The part of an adaptor that keeps the function which it must call for a failed collective. For
    the fake adaptor, beside which it is registered, a `ConnectionError` is a fault, and another
    error a bug of the script.
    """

    failed: Callable[[BaseException, bool], None]

    @pluggy.HookimplMarker("tft")
    def tft_watch_collectives(
        self, entered: Callable[[], None] | None, failed: Callable[[BaseException, bool], None]
    ) -> None:
        """
        Keep `failed`.
        """
        self.failed = failed


KEPT: list[Session] = []
"""The sessions of all tests. The thread that makes a session holds a mutex in the memory of its page
for as long as the thread lives, so this memory must not be freed."""


class Window:
    """
    The step loop of a session without audit that has not joined a job. It stands before the update
    window of its first step.
    """

    def __init__(self, page: Page, run_dir: Path) -> None:
        settings = RankSettings(
            rank=0, world=1, job="j", run_dir=run_dir, broker="127.0.0.1:1", adaptor="fake",
            incarnation=0, page=page.fd, host="127.0.0.1", audit="off",
        )  # fmt: skip
        KEPT.append(Session(settings))
        self.loop, self.gate = KEPT[-1]._loop, KEPT[-1]._gate
        self.loop.begin([], asynchronous=False)


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    """
    Let sessions watch the collectives of the adaptor that is returned.
    """
    found = Collectives()
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(AdaptorSpecs)
    manager.register(fake)
    manager.register(found)
    monkeypatch.setattr(session, "load_adaptor", lambda name: manager)
    return found


@pytest.fixture
def window(collectives: Collectives, tmp_path: Path) -> Iterator[Window]:
    """
    Yield a loop before its first update window.
    """
    page = Page.create()
    yield Window(page, tmp_path)
    page.close()


@pytest.mark.parametrize("raised", [True, False])
def test_window_does_not_open_after_a_failed_collective(
    window: Window, collectives: Collectives, raised: bool
) -> None:
    """When a collective of the step has failed, and the script has caught its exception, then the
    update window raises a fault instead of opening, without an audit too."""
    gone = ConnectionError("gone")
    collectives.failed(gone, raised)
    with pytest.raises(
        TrainingFault, match=r"collective of step 1 has failed, and the script has"
    ) as found:
        window.loop.open_window()
    assert found.value.__cause__ is gone
    assert not window.gate.position().window


def test_window_sends_the_rank_to_an_incident_that_has_begun(
    window: Window, collectives: Collectives
) -> None:
    """When the collectives were aborted because of an incident, and the script has caught the
    exception, then the rank leaves its loop for this incident, and reports no fault of its own."""
    window.gate.enter()
    collectives.failed(ConnectionError("gone"), False)
    window.gate.abandoned.set()
    with pytest.raises(Interrupted):
        window.loop.open_window()


def test_error_of_the_script_may_be_caught(window: Window, collectives: Collectives) -> None:
    """When a collective was refused because of its arguments, and the script has caught the
    exception, then the update window opens as usual."""
    collectives.failed(RuntimeError("reduce_scatter is not supported"), True)
    window.loop.open_window()
    assert window.gate.position().window


def test_failure_is_forgotten_when_the_loop_is_entered_again(
    window: Window, collectives: Collectives
) -> None:
    """When the loop was left after a failed collective, then the loop that begins anew opens its
    windows."""
    collectives.failed(ConnectionError("gone"), True)
    window.loop.attempt(lambda: None)
    window.loop.open_window()
    assert window.gate.position().window
