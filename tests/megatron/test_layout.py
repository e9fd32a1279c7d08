"""
Tests of the entries that megatron-core looks for in a checkpoint, and of the place of a piece of
memory within a tensor.
"""

import torch
from hypothesis import given
from hypothesis import strategies as st
from tft_megatron.checkpoints import views_of
from tft_megatron.layout import Placed, boxes


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """
    Draw a view of a tensor: the whole tensor, its dimensions in another order, or a slice of such a
    view.
    """
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    view = whole.permute(draw(st.permutations(range(len(shape)))))
    axis = draw(st.integers(0, len(shape) - 1))
    begin = draw(st.integers(0, view.shape[axis] - 1))
    return view.narrow(axis, begin, draw(st.integers(1, view.shape[axis] - begin)))


@given(view=views(), cut=st.tuples(st.integers(0, 256), st.integers(0, 256)))
def test_the_boxes_of_a_memory_range_cover_exactly_its_elements(
    view: torch.Tensor, cut: tuple[int, int]
) -> None:
    """When a rank has a range of a parameter's memory, then the boxes cover exactly the elements of
    the view in that range, each once, at the given addresses."""
    start, end = sorted(cut)
    covered = torch.zeros_like(view)
    memory = view.untyped_storage()
    flat = torch.empty(0, dtype=view.dtype).set_(memory)
    for at, shape, first in boxes(
        tuple(view.shape), view.stride(), int(view.storage_offset()), start, end
    ):
        box = view[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))]
        assert torch.equal(flat.as_strided(shape, view.stride(), first), box)
        covered[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))] += 1
    assert torch.equal(covered, ((view >= start) & (view < end)).long())


def test_a_contiguous_tensor_gives_at_most_a_few_boxes() -> None:
    """When a range begins and ends in the middle of rows, then the rows between are one box."""
    found = list(boxes((1000, 64), (64, 1), 0, 100, 50_000))
    assert [shape for _, shape, _ in found] == [(779, 64), (1, 28), (1, 16)]


def piece(key: str, tensor: torch.Tensor) -> Placed:
    """
    Return a whole tensor as one placed piece, at offset zero.
    """
    return Placed(key=key, whole=tuple(tensor.shape), at=(0,) * tensor.dim(), tensor=tensor)


def test_a_tensor_written_for_megatron_is_not_written_again() -> None:
    """When the pieces of a checkpoint cover all of a tensor's memory, then the tensor counts as
    written. A tensor with missing pieces does not, nor one that only looks equal."""
    whole, half, other = torch.arange(24.0).view(4, 6), torch.arange(8.0), torch.arange(24.0)
    upper, lower = whole.chunk(2, dim=1)
    pieces = [piece("upper", upper), piece("lower", lower), piece("half", half[:4])]
    found = views_of({"whole": whole, "half": half, "other": other}, pieces)
    assert list(found) == ["whole"]
    room = torch.zeros(4, 6)
    for name, shape, stride, begin in found["whole"]:
        source = upper if name.startswith("upper") else lower
        room.as_strided(shape, stride, begin).copy_(source)
    assert torch.equal(room, whole)
