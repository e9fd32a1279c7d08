"""
The stage the worker's tests play on: that of the agent, which starts the worker.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.agent.stage import Stage, staged


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    """
    A broker and the controller's end of the bus.
    """
    async with staged(tmp_path) as stage:
        yield stage
