"""
The page of a rank: the values that a reader finds, at whatever moment the writer was killed.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft.errors import UsageError
from tft.page import CAPTURE_LIMIT, ENTRY_WORDS, HEAD_BYTES, RING, SLOT_BYTES, Page
from tft.protocol.messages import Position, SliceDigest, StepWork

WRITER = """
import sys
from tft.page import Page
page = Page.open(int(sys.argv[1]))
for step in range(1, 10**9):
    for closed in (False, True):
        page.capture(step, step.to_bytes(8, "little") * 20_000, closed)
        page.move(step - (not closed), not closed, float(step))
"""


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create()
    yield page
    page.close()


def test_new_page_is_at_step_0_without_captures(page: Page) -> None:
    """When a page is new, then it is at step 0, outside of training, without captures."""
    assert page.position() == Position(step=0, window=False)
    assert (page.training(), page.moved(), page.local_states()) == (False, 0.0, {})


def test_written_values_are_read_through_another_mapping(page: Page) -> None:
    """When the writer changes the page, then a reader with another mapping of the page reads the
    new values."""
    reader = Page.open(os.dup(page.fd))
    page.train(True, 1.5)
    assert (reader.training(), reader.moved()) == (True, 1.5)
    page.move(41, True, 2.5)
    assert (reader.position(), reader.moved()) == (Position(step=41, window=True), 2.5)
    page.move(42, False, 3.5)
    assert reader.position() == Position(step=42, window=False)
    page.train(False, 4.5)
    assert (reader.training(), reader.moved()) == (False, 4.5)
    reader.close()


def test_captures_of_the_last_two_steps_are_kept(page: Page) -> None:
    """When steps advance, then the captures of the last two steps are kept. The capture at the
    close of a step replaces the earlier one of that step."""
    for step in (1, 2, 3):
        page.capture(step, b"opened %d" % step, False)
        page.capture(step, b"closed %d" % step, True)
    assert page.local_states() == {2: b"closed 2", 3: b"closed 3"}
    page.capture(4, b"opened 4", False)
    assert page.local_states() == {2: b"closed 2", 3: b"closed 3", 4: b"opened 4"}


def test_captures_of_abandoned_steps_are_forgotten(page: Page) -> None:
    """When the ranks go back to the end of a step, then later captures are not found. A repeated
    step has only its own new captures."""
    for step in (1, 2, 3):
        page.capture(step, b"opened %d" % step, False)
        page.capture(step, b"closed %d" % step, True)
    page.forget_after(3, (1, 2))
    assert page.local_states() == {2: b"closed 2", 3: b"closed 3"}
    page.forget_after(2, (1, 3))
    assert page.local_states() == {2: b"closed 2"}
    page.capture(3, b"opened anew", False)
    assert page.local_states() == {2: b"closed 2", 3: b"opened anew"}
    page.capture(3, b"closed anew", True)
    assert page.local_states() == {2: b"closed 2", 3: b"closed anew"}


def test_empty_rank_local_state_is_captured(page: Page) -> None:
    """When the rank-local state is empty, then an empty capture is stored."""
    page.capture(0, b"", False)
    assert page.local_states() == {0: b""}


def test_too_long_rank_local_state_is_refused(page: Page) -> None:
    """When the rank-local state is too long, then it is refused, the message names the longest
    allowed length, and the page is unchanged."""
    page.capture(1, b"x" * CAPTURE_LIMIT, True)
    with pytest.raises(UsageError, match=rf"{CAPTURE_LIMIT + 1} bytes; at most {CAPTURE_LIMIT}"):
        page.capture(5, b"x" * (CAPTURE_LIMIT + 1), True)
    assert page.local_states() == {1: b"x" * CAPTURE_LIMIT}


@given(at=st.integers(0, 123), change=st.integers(1, 255))
def test_damaged_capture_is_not_found(at: int, change: int) -> None:
    """When any byte of a capture or of its header differs from the written one, then the capture is
    not found."""
    page = Page.create()
    page.capture(6, bytes(100), True)
    start = HEAD_BYTES + (13 % 4) * SLOT_BYTES + at
    [byte] = os.pread(page.fd, 1, start)
    os.pwrite(page.fd, bytes([byte ^ change]), start)

    assert page.local_states() == {}
    page.close()


def test_killed_writer_leaves_only_whole_captures(page: Page) -> None:
    """When the writer is killed between two stores, then each capture that is found is whole."""
    for _ in range(8):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(page.fd)],
            cwd=Path(__file__).parents[1],
            pass_fds=[page.fd],
        ) as writer:
            while page.position().step < 200:
                # the page is read while the other process writes to it
                for step, local_state in page.local_states().items():
                    assert local_state == step.to_bytes(8, "little") * 20_000
            writer.kill()
        position = page.position()
        found = page.local_states()
        for step, local_state in found.items():
            assert local_state == step.to_bytes(8, "little") * 20_000
        assert position.step in found, "the last closed step is never the one being written"
        page.move(0, False, 0.0)


def test_descriptor_that_is_not_a_page_is_refused(tmp_path: Path) -> None:
    """When the inherited descriptor is closed or is not a page, then it is refused with a message."""
    fd = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(
        UsageError, match=f"file descriptor {fd} should be .* but is something else"
    ):
        Page.open(fd)
    os.close(fd)
    with pytest.raises(UsageError, match=r"cannot be used \(Bad file descriptor\)"):
        Page.open(fd)


# ---------------------------------------------------------------- digests of slices


def digest(step: int, number: int = 0) -> SliceDigest:
    return SliceDigest(
        incident=3, round=2, step=step, number=number, of=48, shard=1, digest=2**64 - step
    )


def post(page: Page, digest: SliceDigest) -> None:
    page.post(
        (digest.incident, digest.round), digest.step, digest.number, digest.of, digest.shard,
        digest.digest,
    )  # fmt: skip


def test_reader_finds_the_newest_digests_in_their_order(page: Page) -> None:
    """When more digests were posted than a reader gets, then it gets the newest ones, the oldest of
    them first."""
    for step in range(1, 301):
        post(page, digest(step, number=step % 48 - 1))
    assert page.posted() == 300
    assert page.digests() == tuple(digest(s, s % 48 - 1) for s in range(237, 301))


def test_digests_do_not_touch_what_else_is_on_the_page(page: Page) -> None:
    """When the ring of digests was filled several times, then position, kept step and captures are
    as before."""
    page.move(7, False, 1.5, tail=True)
    page.capture(7, b"x" * CAPTURE_LIMIT, True)
    page.keeps(6)
    for step in range(1, 1000):
        post(page, digest(step))
    assert page.position() == Position(step=7, window=False, tail=True)
    assert (page.kept(), page.local_states()) == (6, {7: b"x" * CAPTURE_LIMIT})


def test_digest_that_is_being_overwritten_is_left_out(page: Page) -> None:
    """When a process dies while it overwrites a digest, then a reader gets the other ones only."""
    for step in (1, 2, 3):
        post(page, digest(step))
    os.pwrite(page.fd, bytes(8), 8 * (RING + ENTRY_WORDS))
    assert page.digests() == (digest(1), digest(3))


# ---------------------------------------------------------------- steps of which copies are kept


def test_kept_capture_outlives_the_next_steps(page: Page) -> None:
    """When the rank-local state of a step is kept, then it is found after any number of further
    steps, also through another mapping of the page."""
    for step in range(1, 10):
        page.capture(step, b"closed %d" % step, True)
        if step == 3:
            page.keep(step, b"closed 3", ())
    reader = Page.open(os.dup(page.fd))
    assert reader.local_states() == {3: b"closed 3", 8: b"closed 8", 9: b"closed 9"}
    reader.close()


def test_captures_of_the_copies_that_are_left_are_not_overwritten(page: Page) -> None:
    """When more captures are kept than there is room, then the oldest goes, but never one of a step
    of which this rank has a copy."""
    for step in (2, 4, 6, 8, 10, 12, 14):
        page.keep(step, b"%d" % step, (2,))
    assert sorted(page.local_states()) == [2, 8, 10, 12, 14]


def test_kept_capture_of_an_abandoned_step_is_forgotten(page: Page) -> None:
    """When the ranks go back to an earlier step, then kept captures of later steps are not found,
    and their room is used first."""
    for step in (2, 4, 6, 8):
        page.keep(step, b"old", ())
    page.forget_after(5, (1, 1))
    assert page.local_states() == {2: b"old", 4: b"old"}
    page.keep(6, b"new", ())
    page.keep(8, b"new", ())
    assert page.local_states() == {2: b"old", 4: b"old", 6: b"new", 8: b"new"}


def test_capture_that_was_made_anew_replaces_the_kept_one(page: Page) -> None:
    """When the rank-local state of a step is made anew, then it is found instead of the kept one,
    and it can be kept in its place."""
    page.keep(4, b"old", ())
    page.capture(4, b"anew", True)
    assert page.local_states() == {4: b"anew"}
    page.keep(4, b"anew", (4,))
    page.capture(6, b"6", True)
    assert page.local_states() == {4: b"anew", 6: b"6"}


def test_captures_name_the_last_rollback_and_the_closed_windows() -> None:
    """When a rank has captured and rolled back, then all valid captures are read with the incident
    and the round of the rollback, and the number of changes has grown with each of them."""
    page = Page.create()
    assert (page.captured(), page.captures().attempt) == (0, (0, 0))
    page.capture(3, b"open", False)
    page.capture(3, b"closed", True)
    page.capture(4, b"later", False)
    page.keep(2, b"kept", ())
    assert page.captured() == 4
    page.forget_after(3, (7, 5))
    found = page.captures()
    assert page.captured() == 5
    assert found.attempt == (7, 5)
    assert found.local_states == {(2, True): b"kept", (3, False): b"open", (3, True): b"closed"}
    page.close()


def test_late_changes_are_remembered_for_some_steps() -> None:
    """When a capture has changed after the all-reduces of its step, then this is read with the
    captures of the next steps, and forgotten later."""
    page = Page.create()
    assert not page.captures().changes
    page.changes_late(3)
    for step, expected in ((3, True), (22, True), (23, False)):
        page.move(step, False, 1.0)
        assert page.captures().changes is expected
    page.close()


def test_window_that_opens_before_the_captures_are_elsewhere_is_counted() -> None:
    """When an update window opens and another node does not have all captures, then it is counted.
    It is not counted when the agent has written that they are there."""
    page = Page.create()
    page.capture(1, b"one", False)
    assert page.opens()
    assert page.captures().steady
    assert page.unprotected() == 1
    page.capture(2, b"two", False)
    assert not page.opens()
    assert page.unprotected() == 2
    page.capture(3, b"three", False)
    page.is_elsewhere(page.captured())
    assert not page.opens()
    assert page.unprotected() == 2
    page.close()


def test_captures_that_change_within_a_step_count_from_its_window_on() -> None:
    """When a capture has changed before the all-reduces of its step were complete, then each later
    window counts as unprotected, and the captures are to be sent again when it has opened."""
    page = Page.create()
    page.capture(1, b"one", False)
    page.opens()
    page.varies()
    page.capture(2, b"two", False)
    page.is_elsewhere(page.captured())
    before = page.captured()
    assert page.opens()
    assert (page.captured(), page.unprotected()) == (before + 1, 2)
    assert not page.captures().steady
    page.close()


def step_work(step: int) -> StepWork:
    return StepWork(step=step, input=0.25, compute=1.0 * step, update=0.5, waited=0.125)


def test_times_of_steps_are_read_once_and_in_order() -> None:
    """When a rank writes the times of its steps, then a reader gets those that it has not read yet,
    the newest 32 at most."""
    page = Page.create()
    assert (page.worked(), page.work(0)) == (0, ())
    for step in (7, 8):
        page.post_work(step, 0.25, 1.0 * step, 0.5, 0.125)
    assert page.work(0) == (step_work(7), step_work(8))
    assert page.work(1) == (step_work(8),)
    assert page.work(page.worked()) == ()
    for step in range(9, 200):
        page.post_work(step, 0.25, 1.0 * step, 0.5, 0.125)
    assert page.work(2) == tuple(step_work(step) for step in range(168, 200))
    page.close()


def test_times_that_are_being_written_are_left_out() -> None:
    """When a process was killed while it wrote the times of a step, then they are not read."""
    page = Page.create()
    page.post_work(1, 0.25, 1.0, 0.5, 0.125)
    page.post_work(2, 0.25, 2.0, 0.5, 0.125)
    page._words[32] = 0  # the stamp of the first entry, as while it is written
    assert page.work(0) == (step_work(2),)
    page.close()
