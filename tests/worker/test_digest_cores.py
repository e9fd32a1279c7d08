"""
How many processor cores a rank uses to compute digests of its state.
"""

import pytest

from tft.worker.order_executor import cores_for_digests


@pytest.mark.parametrize(
    ("usable", "ranks", "alone", "cores"),
    [
        (8, "4", False, 2),
        (8, "4", True, 8),
        (3, "4", False, 3),
        (8, "16", False, 1),
        (8, "", False, 8),
    ],
    ids=["shared", "alone", "bound", "more ranks than cores", "number of ranks unknown"],
)
def test_ranks_of_a_node_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, *, usable: int, ranks: str, alone: bool, cores: int
) -> None:
    """When several ranks of a node with eight cores compute digests, then they share the cores. A
    rank that is alone uses all, and a rank that is bound to some cores uses these."""
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(usable))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert cores_for_digests(alone=alone) == cores
