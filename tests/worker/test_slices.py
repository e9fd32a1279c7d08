"""
The digests of slices that a rank posts on its page, with an adaptor made for the test.
"""

import weakref
from collections.abc import Iterator
from itertools import count

import numpy
import pluggy
import pytest

from tft.core.link.slice_comparison import CONTRIBUTION
from tft.page import Page
from tft.protocol.messages import ShardCopies
from tft.spi import AdaptorSpecs, Buffer, SliceContent, hookimpl
from tft.worker.slices import AT_ONCE, Slices

OF = 4


class Adaptor:
    """
    Holds one buffer for each shard, and notes how often it is asked for them.
    """

    def __init__(self, size: int) -> None:
        self.memory = bytearray(range(256)) * (size // 256)
        self.head = b"head"
        self.moved = 0
        self.listed = 0
        self.asked = 0

    @hookimpl
    def tft_slices(self, shard: str) -> SliceContent:
        self.listed += 1
        buffers = (Buffer(name="values", view=memoryview(self.memory)),)
        return SliceContent(head=self.head, buffers=buffers, identity=(self.moved,))

    @hookimpl
    def tft_contribution(self) -> int:
        self.asked += 1
        return 7


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create()
    yield page
    page.close()


def slices(adaptor: object, page: Page, *holders: int) -> Slices:
    """
    Return the slices of a rank that holds one shard for each number of holders.
    """
    manager = pluggy.PluginManager("tft")
    manager.add_hookspecs(AdaptorSpecs)
    manager.register(adaptor)
    made = Slices(manager.hook, page)
    made.begin(
        [
            ShardCopies(shard=f"shard-{number}", ranks=tuple(range(size)))
            for number, size in enumerate(holders)
        ]
    )
    return made


def posted(page: Page, since: int = 0) -> list[tuple[int, int, int]]:
    """
    Return the step, the number of the slice and the shard of each digest.
    """
    return [(each.step, each.number, each.shard) for each in page.digests(since)]


@pytest.mark.parametrize(
    ("holders", "asked"), [((2,), True), ((3,), False), ((3, 2), True), ((4, 1), False)]
)
def test_contribution_is_digested_where_no_majority_can_decide(
    page: Page, holders: tuple[int, ...], asked: bool
) -> None:
    """When exactly two ranks hold a shard, then the contribution to the gradients is digested in
    each step. Among more copies a majority shows which one is wrong."""
    adaptor = Adaptor(1024)
    assert slices(adaptor, page, *holders).digest(1, 1, OF) is None
    assert adaptor.asked == asked
    assert (
        (1, CONTRIBUTION, 0) in posted(page) if asked else (1, CONTRIBUTION, 0) not in posted(page)
    )
    compared = [index for index, count in enumerate(holders) if count > 1]
    assert [shard for _, number, shard in posted(page) if number == 1] == compared


def test_memory_that_stays_is_listed_once_in_a_cycle(page: Page) -> None:
    """When a whole cycle has listed the same memory, then it is listed once in each further cycle. A
    change of one byte changes the digest of its slice in each of them."""
    adaptor = Adaptor(1024)
    made = slices(adaptor, page, 3)
    for step in range(1, 3 * OF + 1):
        adaptor.memory[256 * (step % OF)] = step  # the first byte of the slice
        assert made.digest(step, step % OF, OF) is None
    assert adaptor.listed < 2 * OF
    digests = {each.step: each.digest for each in page.digests()}
    assert len(set(digests.values())) == 3 * OF


def test_new_settings_change_the_digest_of_slice_0(page: Page) -> None:
    """When a setting of a shard changes while its memory stays, then the next digest of slice 0
    differs, also after many cycles. The digests of the other slices stay."""
    adaptor = Adaptor(1024)
    made = slices(adaptor, page, 3)
    for step in range(1, 4 * OF):
        made.digest(step, step % OF, OF)
    old = {each.number: each.digest for each in page.digests()}
    adaptor.head = b"other"
    for step in range(4 * OF, 5 * OF):
        made.digest(step, step % OF, OF)
    new = {each.number: each.digest for each in page.digests()}
    assert [number for number in range(OF) if new[number] != old[number]] == [0]


def test_memory_that_was_replaced_is_read_after_the_next_listing(page: Page) -> None:
    """When the memory of a shard is replaced, then a later cycle digests the new memory, and memory
    is listed in each step again."""
    adaptor = Adaptor(1024)
    made = slices(adaptor, page, 3)
    for step in range(1, 2 * OF + 1):
        made.digest(step, step % OF, OF)
    old = {each.number: each.digest for each in page.digests()}
    adaptor.memory, adaptor.moved, adaptor.listed = bytearray(1024), 1, 0
    for step in range(3 * OF, 4 * OF):
        made.digest(step, step % OF, OF)
    new = {each.number: each.digest for each in page.digests()}
    assert adaptor.listed == OF
    assert all(new[number] != old[number] for number in range(OF))


class Copies:
    """
    Lists a new copy of its memory each time, as an object does whose state_dict returns copies. The
    allocator gives a copy the memory of a freed one.
    """

    def __init__(self) -> None:
        self.memory = bytearray(1024)
        self._rooms: dict[int, bytearray] = {}

    @hookimpl
    def tft_slices(self, shard: str) -> SliceContent:
        place = next(n for n in count() if n not in self._rooms)
        self._rooms[place] = bytearray(self.memory)
        array = numpy.frombuffer(self._rooms[place], numpy.uint8)
        view = memoryview(array)  # type: ignore[arg-type]  # numpy has no types of buffers here
        buffers = (Buffer(name="values", view=view),)
        weakref.finalize(array, self._rooms.pop, place)
        return SliceContent(head=b"head", buffers=buffers, identity=(place,))


def test_copies_in_freed_memory_are_listed_in_each_step(page: Page) -> None:
    """When an adaptor lists a copy, and a later copy may have the memory of an earlier one, then
    each step digests the present content."""
    adaptor = Copies()
    made = slices(adaptor, page, 3)
    for step in range(1, 4 * OF):
        adaptor.memory[256 * (step % OF)] = step  # the first byte of the slice
        made.digest(step, step % OF, OF)
    assert len({each.digest for each in page.digests()}) == 4 * OF - 1


def test_forgotten_memory_is_listed_again(page: Page) -> None:
    """When the references to the memory were dropped, then the next digest lists it anew. If the
    memory has stayed the same, then it is still listed once in each cycle."""
    adaptor = Adaptor(1024)
    made = slices(adaptor, page, 3)
    for step in range(1, 2 * OF + 2):
        made.digest(step, step % OF, OF)
    listed = adaptor.listed
    made.forget()
    for step in range(2 * OF + 2, 3 * OF):
        made.digest(step, step % OF, OF)
    assert adaptor.listed == listed + 1


def test_large_slice_is_left_to_the_caller(page: Page) -> None:
    """When a slice is large, then nothing is posted until the returned function is called. Its
    digests belong to the attempt in which the slice was due."""
    adaptor = Adaptor(2 * OF * AT_ONCE)
    made = slices(adaptor, page, 3)
    made.resume(3, 1)
    work = made.digest(5, 1, OF)
    assert work is not None
    assert posted(page) == []
    made.resume(4, 1)
    work()
    (digest,) = page.digests()
    assert (digest.incident, digest.round, digest.step, digest.number) == (3, 1, 5, 1)
