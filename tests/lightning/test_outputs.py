"""
A replacement process does not take a part of an output that was left out for absent.
"""

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from tft_lightning.outputs import PartialOutput, partly_kept
from tft_pytorch.plain_values import placed

from tft.errors import UsageError
from tft.spi import pack, unpack


class Kind(Enum):
    """
    A name that a script may give a part.
    """

    LOSS = 1


@pytest.fixture
def output() -> PartialOutput:
    """
    Return an output whose logits were left out.
    """
    return PartialOutput({"loss": 1.0}, ["logits"])


@pytest.mark.parametrize(
    "use",
    [
        lambda output: output["logits"],
        lambda output: output.get("logits"),
        lambda output: "logits" in output,
        lambda output: output.pop("logits", None),
        lambda output: list(output.values()),
        lambda output: dict(output),
        lambda output: {**output},
        lambda output: output.copy(),
    ],
)
def test_a_question_for_a_part_that_was_left_out_raises(
    output: PartialOutput, use: Callable[[PartialOutput], Any]
) -> None:
    """When a callback asks for a part that was left out, in whatever way, then the sentence names
    it."""
    with pytest.raises(UsageError, match=r"outputs\['logits'\]"):
        use(output)


def test_the_rest_is_as_in_the_first_process(output: PartialOutput) -> None:
    """When a callback asks for what was kept, or for what was never there, then it gets the answers
    of an ordinary dict."""
    assert isinstance(output, dict)
    assert (output["loss"], output.get("loss"), output.get("other", 2)) == (1.0, 1.0, 2)
    assert "loss" in output
    assert "other" not in output
    assert [*output] == [*output.keys()] == ["loss", "logits"]
    assert len(output) == 2
    with pytest.raises(KeyError):
        output["other"]


def test_names_of_other_types_can_be_stored() -> None:
    """When `training_step` names parts by members of an enumeration or by objects, then the state can be
    packed, and a question for such a part of an enumeration raises."""
    output = {"loss": 1.0, 3: None, Kind.LOSS: 2.0, object(): 3.0, "big": "x" * 40_000}
    kept, left_out = partly_kept(output)
    assert kept == {"loss": 1.0, 3: None}
    names: Any = unpack(pack(left_out))
    partial = PartialOutput(kept, placed(names, torch.device("cpu")))
    for name in (Kind.LOSS, "big"):
        with pytest.raises(UsageError):
            partial.get(name)
