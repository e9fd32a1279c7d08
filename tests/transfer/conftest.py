"""
Closes everything that a test of a transfer opens. No thread may be left.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.transfer.peers import C, Opened


@pytest.fixture
def opened() -> Iterator[Opened]:
    """
    Close the opened objects, the last one first.
    """
    before = set(threading.enumerate())
    with ExitStack() as stack:

        def take_charge(thing: C) -> C:
            stack.callback(thing.close)
            return thing

        yield take_charge
    assert [thread.name for thread in set(threading.enumerate()) - before] == []
