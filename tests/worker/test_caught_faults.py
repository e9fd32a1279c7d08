"""
Scripts that catch the exception of a collective before the update window, and continue.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pluggy
import pytest

from tft.errors import Interrupted
from tft.spi import TrainingFault
from tft.spi.adaptor import AdaptorSpecs
from tft.worker.step_gate import Gate
from tft.worker.step_loop import StepLoop, step_hooks


class Collectives:
    """
    An adaptor of a rank without state. It keeps the function that it must call for a failed
    collective.
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

    @pluggy.HookimplMarker("tft")
    def tft_capture(self, closing: bool) -> bytes:
        """
        Return an empty rank-local state.
        """
        return b""


class Window:
    """
    A step loop without audit that stands before the update window of its first step. An error that
    is a `ConnectionError` counts as a fault, another one as a bug of the script.
    """

    def __init__(self) -> None:
        self.adaptor = Collectives()
        manager = pluggy.PluginManager("tft")
        manager.add_hookspecs(AdaptorSpecs)
        manager.register(self.adaptor)
        self.gate = Gate(manager.hook)
        page = Mock()
        page.tailed.return_value = False
        self.loop = StepLoop(
            settings=Mock(world=1, last_step=0, bell=None), page=page, gate=self.gate,
            control=Mock(), hooks=step_hooks(manager.hook),
            observers=Mock(watch_numbers=False, watch_releases=False, work=None),
            periodic=Mock(), after=Mock(), fault=self.fault, carry_out=Mock(),
        )  # fmt: skip
        self.loop.begin([], asynchronous=False)

    def fault(self, error: BaseException) -> Any:  # Any: a part of a report
        """
        Return the kind of an error.
        """
        known = isinstance(error, ConnectionError)
        return SimpleNamespace(kind="network" if known else "software")


@pytest.mark.parametrize("raised", [True, False])
def test_window_does_not_open_after_a_failed_collective(raised: bool) -> None:
    """When a collective of the step has failed, and the script has caught its exception, then the
    update window raises a fault instead of opening, without an audit too."""
    window = Window()
    gone = ConnectionError("gone")
    window.adaptor.failed(gone, raised)
    with pytest.raises(
        TrainingFault, match=r"collective of step 1 has failed, and the script has"
    ) as found:
        window.loop.open_window()
    assert found.value.__cause__ is gone
    assert not window.gate.position().window


def test_window_sends_the_rank_to_an_incident_that_has_begun() -> None:
    """When the collectives were aborted because of an incident, and the script has caught the
    exception, then the rank leaves its loop for this incident, and reports no fault of its own."""
    window = Window()
    window.gate.enter()
    window.adaptor.failed(ConnectionError("gone"), False)
    window.gate.abandoned.set()
    with pytest.raises(Interrupted):
        window.loop.open_window()


def test_error_of_the_script_may_be_caught() -> None:
    """When a collective was refused because of its arguments, and the script has caught the
    exception, then the update window opens as usual."""
    window = Window()
    window.adaptor.failed(RuntimeError("reduce_scatter is not supported"), True)
    window.loop.open_window()
    assert window.gate.position().window


def test_failure_is_forgotten_when_the_loop_is_entered_again() -> None:
    """When the loop was left after a failed collective, then the loop that begins anew opens its
    windows."""
    window = Window()
    window.adaptor.failed(ConnectionError("gone"), True)
    window.loop.attempt(lambda: None)
    window.loop.open_window()
    assert window.gate.position().window
