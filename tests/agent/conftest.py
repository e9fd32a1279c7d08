"""
The fixture of the agent tests: a real agent, with the test in place of the controller.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """
    Yield a `Stage`: a running broker, and the controller's connection to the message bus.
    """
    async with staged(tmp_path) as stage:
        yield stage
