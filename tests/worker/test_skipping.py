"""
Data that can leave out batches, and data that cannot.
"""

import pytest
from tft_pytorch import Prefetcher

from tests.agent.stage import Stage, package
from tft.errors import UsageError
from tft.protocol.messages import Exited
from tft.worker.session import refuse_without_skip

SCRIPT = """
import array
import tft
from tft.errors import UsageError


class Numbers:
    values = array.array("d", [0.0])


session = tft.init()
try:
    session.adopt(model=Numbers())
except UsageError as error:
    (session.run_dir / "refusal").write_text(str(error))
"""


RIGID = "from tft.testing.adaptor import *\n\ndel tft_skip\n"
"""An adaptor that cannot leave out batches."""


class Fixed:
    """
    Data that cannot leave out batches.
    """

    def next(self) -> int:
        """
        Return a batch.
        """
        return 1

    def state_dict(self) -> dict[str, int]:
        """
        Return the position.
        """
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """
        Go to a position.
        """


class Odd(Fixed):
    """
    Data with something else of the name.
    """

    skip = None


class Skips(Fixed):
    """
    Data that can leave out batches.
    """

    def skip(self, batches: int) -> None:
        """
        Leave out batches.
        """


@pytest.mark.parametrize(
    "data", [Fixed(), Odd(), [], Prefetcher(Fixed()), Prefetcher(Prefetcher(Odd()))]
)
def test_data_that_cannot_leave_out_batches_is_refused(data: object) -> None:
    """When batches are to be left out, then data without a method for it are refused with a
    sentence. Data that only pass on those of a source need a source with that method."""
    for able in (Skips(), Prefetcher(Skips()), Prefetcher(Prefetcher(Skips()))):
        refuse_without_skip(able)
    with pytest.raises(UsageError, match=f"a {type(data).__name__} has no method skip"):
        refuse_without_skip(data)


@pytest.mark.parametrize(("adaptor", "words"), [
    ("fake", "the script has handed over no `data` with a method skip(batches)"),
    ("rigid", "the adaptor 'rigid' cannot leave out batches (tft_skip)"),
])  # fmt: skip
async def test_job_without_batches_to_leave_out_is_refused(
    stage: Stage, adaptor: str, words: str
) -> None:
    """When batches are to be left out, and the script hands over no data or the adaptor cannot leave
    out batches, then the script is refused at the start."""
    package(stage.tmp / "packages", "rigid", RIGID, "tft.adaptors")
    await stage.agent(SCRIPT, adaptor=adaptor, skip_batch=True)
    await stage.start()
    await stage.report(Exited)
    refusal = (stage.run_dir / "refusal").read_text()
    assert words in refusal
    assert "without --skip-batch" in refusal
