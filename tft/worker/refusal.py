"""
The refusal of an update because of the numbers of its step (losses, gradient norm), for example a
NaN.
"""

import struct

import xxhash

from tft.errors import chain_of
from tft.protocol.messages import StepNumbers
from tft.spi.faults import TrainingFault
from tft.spi.types import Numbers


class UpdateRefused(TrainingFault):
    """
    Raised before an update window opens, when this rank or another rank refuses the update. The
    state is still that of the end of the previous step.
    """

    def __init__(self, text: str, numbers: Numbers) -> None:
        super().__init__(text, kind="numeric")
        self.numbers = step_numbers(numbers)


def step_numbers(numbers: Numbers) -> StepNumbers:
    """
    Return digests of the numbers of a step (losses, gradient norm). They show whether the rank gets
    the same numbers when the step is computed again. All NaN values give the same digest.
    """
    own = (*numbers.losses, *numbers.own)
    common = () if numbers.norm is None else (numbers.norm,)
    return StepNumbers(
        own=_digest(own), common=_digest(common), batches=max(1, len(numbers.losses))
    )


def refusal_in(error: BaseException) -> UpdateRefused | None:
    """
    Return the `UpdateRefused` in the chain of causes of an exception (the exception itself
    included), or None if there is none.
    """
    return next(
        (each for each in chain_of(error, hidden=True) if isinstance(each, UpdateRefused)), None
    )


def _digest(numbers: tuple[float, ...]) -> str:
    plain = [float("nan") if each != each else each for each in numbers]
    return xxhash.xxh3_128_hexdigest(struct.pack(f"<{len(plain)}d", *plain))
