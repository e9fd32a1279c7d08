"""
Says which values of MindSpore can be saved and made again as plain values: Tensors, in addition to
the values of Python and numpy that `tft.spi.plain_values` handles.
"""

from typing import Any

from mindspore import Tensor

from tft.spi.plain_values import LIMIT, Large, NotPlain, PlainValues, array_form, array_of


def _tensor(value: Any, depth: int) -> Any:  # Any: MindSpore gives mypy no types
    if value.nbytes > LIMIT:
        return Large(value.nbytes)
    try:
        found = value.asnumpy()
    except (TypeError, RuntimeError):  # raised if numpy does not have the type of the elements
        raise NotPlain from None
    return array_form("Tensor", found)


# The attributes of callbacks are saved at the end of every step, so copies must be cheap. A value
# that is larger than a saved attribute may be (`LIMIT`) is not copied, but replaced by a `Large`
# object.
values = PlainValues(
    forms={Tensor: _tensor},
    makers={"Tensor": lambda parts, place: Tensor(array_of(parts))},
    frameworks=("mindspore", "mindformers", "mindio_ttp", "tft", "tft_mindspore"),
    large=LIMIT,
    many=LIMIT // 8,
    own_dicts=False,
)
