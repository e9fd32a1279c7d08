"""
Measure the comparison of copies in an incident against one read of the state by one thread, in
turns. The state is that of a GPT with AdamW after a step, adopted as in the example.
"""

import json
import statistics
import time

import torch
import xxhash
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from tft_pytorch import adaptor
from tft_pytorch.memory import readable
from tft_pytorch.state_store import StateStore

ROUNDS = 15
WIDTHS = (1024, 2560)
"""Of the further layers of numbers beside the example's model, so that the state has a size that counts."""
LAYERS = 12


def main() -> None:
    """
    Print one line for each width: the ratio of the two times, and the size of the state.
    """
    torch.set_num_threads(1)
    for width in WIDTHS:
        measure(width)


def measure(width: int) -> None:
    """
    Print the ratio for a state with layers of this width.
    """
    model = GPT(SIZES["tiny"])
    for number in range(LAYERS):
        model.register_parameter(f"more{number}", torch.nn.Parameter(torch.randn(width, width)))
    optimizer = make_optimizer(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    adaptor.tft_adopt(
        parts={
            "model": model, "optimizer": optimizer, "scheduler": make_scheduler(optimizer, 10),
        },
        wrap=None,
    )  # fmt: skip
    state = adaptor._hooks.state()
    assert isinstance(state, StateStore)
    tensors = list(state.content("dense").tensors.values())

    def read() -> None:
        sum_ = xxhash.xxh3_128()
        for tensor in tensors:
            sum_.update(readable("", tensor).view)
        sum_.digest()

    def compare() -> None:
        adaptor.tft_compare(shard="dense")

    ratios = []
    for _ in range(ROUNDS):
        ratios.append(_timed(compare) / _timed(read))
    print(
        json.dumps(
            {
                "benchmark": "comparison",
                "unit": "times one reading of the state",
                "median": round(statistics.median(ratios), 3),
                "worst": round(max(ratios), 3),
                "megabytes": round(sum(tensor.nbytes for tensor in tensors) / 2**20),
            }
        )
    )


def _timed(work: object) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]  # it is a function
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
