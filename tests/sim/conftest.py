"""
Prints the results of many schedules at the end of a test run, whether the tests passed or not.
"""

from collections.abc import Callable

import pytest

TOLD = pytest.StashKey[list[str]]()


@pytest.fixture(scope="session")
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """
    Return a function that adds a page to be printed at the end.
    """
    return request.config.stash.setdefault(TOLD, []).append


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """
    Print all pages.
    """
    for page in config.stash.get(TOLD, []):
        terminalreporter.section("simulated cluster")
        terminalreporter.write(page)
