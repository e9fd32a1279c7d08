"""
Settings for the tests of the adaptor for Transformers, which `make test-transformers` runs in an environment of
their own. Where Transformers is not installed, pytest does not collect these tests.
"""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("transformers") else ["test_*.py"]


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """
    The stand-in for process groups, as rank 1 of 2, and the environment of such a rank.
    """
    from tft_transformers.standin import stand_aside, stand_in

    ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**ranks, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    stand_in(1, 2)
    yield
    stand_aside()
