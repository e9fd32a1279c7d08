"""
What came of many schedules is told at the end of a run of the tests, whether they passed or not.
"""

from collections.abc import Callable

import pytest

TOLD = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """
    Have a page told at the end.
    """
    return request.config.stash.setdefault(TOLD, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """
    A page for each.
    """
    for page in config.stash.get(TOLD, []):
        terminalreporter.section("simulated cluster")
        terminalreporter.write(page)
