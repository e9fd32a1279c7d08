"""
Plain values of MindSpore: Tensors, beside what `tft.spi.plain_values` copies and makes again.
"""

from typing import Any

from mindspore import Tensor

from tft.spi.plain_values import LIMIT, Large, NotPlain, PlainValues, array_form, array_of


def _tensor(value: Any, depth: int) -> Any:  # Any: MindSpore gives mypy no types
    if value.nbytes > LIMIT:
        return Large(value.nbytes)
    try:
        found = value.asnumpy()
    except (TypeError, RuntimeError):  # a type that numpy does not have
        raise NotPlain from None
    return array_form("Tensor", found)


# All attributes of callbacks are noted at the end of each step. So what is larger than one of them
# may be is not even copied, unlike with PyTorch, where constant attributes are sorted out first.
values = PlainValues(
    forms={Tensor: _tensor},
    makers={"Tensor": lambda parts, place: Tensor(array_of(parts))},
    frameworks=("mindspore", "mindformers", "mindio_ttp", "tft", "tft_mindspore"),
    large=LIMIT,
    many=LIMIT // 8,
    own_dicts=False,
)
