"""
The bytes of a transfer: frames and chunks survive any division of the stream, and damage is found.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft.errors import MalformedMessage
from tft.transfer.wire import (
    CHUNK,
    SMALLEST_CHUNK,
    Hello,
    Read,
    Refusal,
    Request,
    Run,
    ShardOffer,
    Views,
    chunks,
    fingerprint,
    frame,
    read_frame,
    receive_chunk,
    send_chunk,
)

WORDS = [
    Hello(job="job", rank=3, shard="model", step=12),
    ShardOffer(meta=b"\x00\xff", buffers=(("a", 0), ("b", 2**40))),
    Refusal(why="because"),
    Request(offset=2**40, length=CHUNK),
]
KEY = fingerprint(ShardOffer(meta=b"", buffers=()))


def stream(content: bytes, mouthful: int = 1 << 30) -> Read:
    """
    Return a function that reads from these bytes, at most `mouthful` at a time, as a socket may.
    """
    left = bytearray(content)

    def read(views: Views) -> int:
        piece = left[: min(mouthful, views[0].nbytes)]
        views[0][: len(piece)] = piece
        del left[: len(piece)]
        return len(piece)

    return read


def sink(mouthful: int = 1 << 30) -> tuple[bytearray, Callable[[Views], int]]:
    """
    Return a buffer and a function that writes to it, at most `mouthful` bytes at a time.
    """
    sent = bytearray()

    def send(views: Views) -> int:
        piece = b"".join(views)[:mouthful]
        sent.extend(piece)
        return len(piece)

    return sent, send


@pytest.mark.parametrize("said", WORDS, ids=lambda said: type(said).__name__)
def test_frame_read_byte_by_byte_gives_the_message_sent(
    said: Hello | ShardOffer | Refusal | Request,
) -> None:
    """When a frame is read one byte at a time, then the reader gives the message that was sent."""
    assert read_frame(stream(frame(said), mouthful=1), 1000) == said


@given(st.sampled_from(WORDS), st.data())
def test_frame_with_a_flipped_bit_is_rejected(
    said: Hello | ShardOffer | Refusal | Request, data: st.DataObject
) -> None:
    """When one bit of a frame is flipped, then reading the frame raises `MalformedMessage`, or
    `EOFError` because the frame seems longer than the bytes that arrive."""
    whole = bytearray(frame(said))
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises((MalformedMessage, EOFError)):
        read_frame(stream(bytes(whole)), 1000)


def test_frame_longer_than_the_limit_is_refused() -> None:
    """When a frame is longer than the limit of its reader, then the reader refuses the frame after
    reading the length alone."""
    with pytest.raises(
        MalformedMessage, match="a frame of 1001 bytes was received, but at most 1000"
    ):
        read_frame(stream((1001).to_bytes(4, "big") + bytes(16)), 1000)


@given(
    st.lists(st.binary(max_size=40), max_size=20),
    st.integers(1, 50),
    st.data(),
)
def test_received_chunk_fills_exactly_its_part_of_the_buffers(
    buffers: list[bytes], mouthful: int, data: st.DataObject
) -> None:
    """When a chunk is sent, then exactly its part of the receiver's buffers is written. This holds
    for any split of the bytes on the connection and for any set of buffers."""
    whole = b"".join(buffers)
    if not whole:
        return
    offset = data.draw(st.integers(0, len(whole) - 1))
    chunk = Request(offset=offset, length=data.draw(st.integers(1, len(whole) - offset)))
    room = [bytearray(len(buffer)) for buffer in buffers]
    sent, send = sink(mouthful)

    send_chunk(Run([memoryview(buffer) for buffer in buffers]), chunk, KEY, send)
    good = receive_chunk(
        Run([memoryview(buffer) for buffer in room]), chunk, KEY, stream(bytes(sent), mouthful)
    )

    assert good
    until = chunk.offset + chunk.length
    assert b"".join(room) == (
        bytes(chunk.offset) + whole[chunk.offset : until] + bytes(len(whole) - until)
    )


@pytest.mark.parametrize("position", [0, 1234, 299_999, 300_000, 300_015])
def test_chunk_with_a_flipped_bit_is_reported_as_wrong(position: int) -> None:
    """When one bit of a chunk or of its digest is flipped on the connection, then the receiver
    reports the chunk as wrong."""
    chunk = Request(offset=0, length=300_000)
    sent, send = sink()
    send_chunk(Run([memoryview(bytes(300_000))]), chunk, KEY, send)
    sent[position] ^= 1

    room = Run([memoryview(bytearray(300_000))])
    assert not receive_chunk(room, chunk, KEY, stream(bytes(sent)))


def test_chunk_of_another_offset_or_offer_is_reported_as_wrong() -> None:
    """When a source sends a chunk of another offset or of another offer, then the receiver reports
    the chunk as wrong, even if its bytes are equal."""
    run = Run([memoryview(bytearray(100))])
    sent, send = sink()
    send_chunk(run, Request(offset=10, length=10), KEY, send)

    wanted = Request(offset=20, length=10)
    assert not receive_chunk(run, wanted, KEY, stream(bytes(sent)))
    other = fingerprint(ShardOffer(meta=b"other", buffers=()))
    assert not receive_chunk(run, Request(offset=10, length=10), other, stream(bytes(sent)))


@pytest.mark.parametrize("size", [0, 1, SMALLEST_CHUNK, 10_000_000, 100 * CHUNK + 1])
@pytest.mark.parametrize("sources", [1, 2, 5])
def test_chunks_cover_a_run_without_gap_or_overlap(size: int, sources: int) -> None:
    """When a run is cut into chunks, then the chunks are in order, without gap or overlap. A run of
    10 MB has at least three chunks."""
    cut = chunks(size, sources)

    at = 0
    for chunk in cut:
        assert chunk.offset == at
        assert 0 < chunk.length <= CHUNK
        at += chunk.length
    assert at == size
    if size == 10_000_000:
        assert len(cut) >= min(3 * sources, 3)
