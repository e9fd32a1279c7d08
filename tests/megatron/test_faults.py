"""
Tests of the fault kind that an exception out of a Megatron training loop means.
"""

import pytest
from tft_megatron.faults import classify

from tft.spi.types import Diagnosis
from tft.worker.diagnosis import Diagnostician

SPREAD = Diagnosis(kind="numeric", polluted=True)
SINCE = Diagnosis(kind="numeric", polluted=True, not_after=1200)


@pytest.mark.parametrize(
    ("error", "diagnosis"),
    [
        (RuntimeError("PRECISION ERROR"), SPREAD),
        (RuntimeError("rank 3: PRECISION ERROR in grad norm"), SPREAD),
        (RuntimeError("PRECISION ERROR, load ckpt step=1200"), SINCE),
        (RuntimeError("PRECISION ERROR: load ckpt step = 1200."), SINCE),
        (RuntimeError("load ckpt step=1200: PRECISION ERROR"), SINCE),
        (RuntimeError("PRECISION ERROR, load ckpt step=last"), SPREAD),
        (RuntimeError("load ckpt step=1200"), Diagnosis(kind="software")),
        (RuntimeError("precision error"), Diagnosis(kind="software")),
        (ValueError("PRECISION ERROR"), Diagnosis(kind="software")),
        (RuntimeError("PRECISION ERROR after UCE ERROR"), Diagnosis(kind="memory")),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), Diagnosis(kind="network")),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_an_exception_is_classified_by_its_text(error: BaseException, diagnosis: Diagnosis) -> None:
    """When an exception reports wrong numbers, then no copy of the last update is sound. If the
    exception names a step, then no copy of a later step is sound. Device errors take precedence."""
    assert Diagnostician(classify).diagnose(error) == diagnosis
