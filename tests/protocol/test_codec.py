"""
The codec: a message is decoded as it was encoded, and invalid frames are refused with a sentence.
"""

import json
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tft.errors import MalformedMessage, UsageError
from tft.protocol import codec
from tft.protocol.frames import FRAME_LIMIT
from tft.protocol.messages import MESSAGES, VERSION, Beat, Envelope, Message, Position, Pulse, Save

INT64 = st.integers(min_value=-(2**63), max_value=2**63 - 1)
# only numbers that MessagePack can carry; `from_type` uses these strategies
st.register_type_strategy(int, INT64)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))

messages = st.one_of([st.from_type(kind) for kind in MESSAGES])
plain = st.recursive(
    st.none()
    | st.booleans()
    | INT64
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4) | INT64, inner, max_size=3)
    ),
    max_leaves=8,
)

BEAT = Beat(
    node=1,
    pulses=(
        Pulse(
            rank=2,
            incarnation=0,
            position=Position(step=7, window=False),
            training=True,
            moved=1.5,
        ),
    ),
    at=2.5,
)
ENVELOPE = Envelope(job="job", sender="node.1/0", number=0, message=BEAT)


def spoilt(**changes: object) -> bytes:
    """
    Return the frame of ENVELOPE with some of its top-level fields changed.
    """
    frame: bytes = msgpack.packb({**msgpack.unpackb(codec.encode(ENVELOPE)), **changes})
    return frame


def spoilt_body(**changes: object) -> bytes:
    """
    Return the frame of ENVELOPE with some fields of its message changed.
    """
    return spoilt(body={**msgpack.unpackb(codec.encode(ENVELOPE))["body"], **changes})


# ---------------------------------------------------------------- encoding and decoding


@given(message=messages, sender=st.text(), number=st.integers(0, 2**63 - 1))
def test_encoded_message_is_decoded_unchanged(message: Message, sender: str, number: int) -> None:
    """When any message is encoded and decoded, then the result is equal to the message."""
    envelope = Envelope(job="job", sender=sender, number=number, message=message)

    assert codec.decode(codec.encode(envelope)) == envelope


@given(message=messages)
def test_message_survives_json_unchanged(message: Message) -> None:
    """When any message is written as JSON and read again, then the result is equal to the message,
    including maps by rank."""
    kind, body = codec.to_plain(message)

    assert codec.from_plain(kind, json.loads(json.dumps(body))) == message


def test_map_by_rank_keeps_integer_keys_after_json() -> None:
    """When the keys of a map are ranks, then they are integers again after JSON, which writes keys
    as text."""
    save = Save(
        epoch=1,
        incident=1,
        round=1,
        to=(0,),
        directory="d",
        step=3,
        shards=("replica",),
        local_state={11: "00ff"},
    )

    kind, body = codec.to_plain(save)

    assert kind == "Save"
    assert body["local_state"] == {"11": "00ff"}
    assert codec.from_plain(kind, json.loads(json.dumps(body))) == save


def test_frame_has_the_documented_fields() -> None:
    """When a frame is read with a plain MessagePack library, then it has the fields of
    `docs/reference/wire.md`."""
    assert msgpack.unpackb(codec.encode(ENVELOPE)) == {
        "v": VERSION,
        "job": "job",
        "from": "node.1/0",
        "n": 0,
        "kind": "Beat",
        "body": {
            "node": 1,
            "pulses": [
                {
                    "rank": 2,
                    "incarnation": 0,
                    "position": {"step": 7, "window": False, "tail": False, "after": False},
                    "training": True,
                    "moved": 1.5,
                    "digests": [],
                    "kept": 0,
                    "unprotected": 0,
                    "work": [],
                }
            ],
            "at": 2.5,
        },
    }


def test_text_that_is_not_valid_unicode_is_sent_escaped() -> None:
    """When the text of a message is not valid Unicode, then the message is sent with that text
    escaped."""
    strange = replace(ENVELOPE, sender="caf\udce9")

    assert codec.decode(codec.encode(strange)).sender == "caf\\udce9"


# ---------------------------------------------------------------- refused frames


def test_message_of_another_version_is_refused() -> None:
    """When a peer has another version of the protocol, then its message is refused. The sentence
    names both versions, the sender, and the remedy."""
    with pytest.raises(MalformedMessage) as refusal:
        codec.decode(spoilt(v=VERSION + 1, body="whatever shape that version has"))

    assert str(refusal.value) == (
        f"'node.1/0' uses version {VERSION + 1} of the protocol between tft's processes, but "
        f"this process uses version {VERSION}: install the same tft on every node of the job"
    )


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (b"", "0 bytes are not MessagePack"),
        (b"\xc1", "1 bytes are not MessagePack"),
        (b"\xdd\xff\xff\xff\xff", "not MessagePack: 4294967295 exceeds"),
        (b"\x91" * 5000, "5000 bytes are not MessagePack"),
        (b"\x81\x91\x01\x01", "not MessagePack: unhashable"),
        (msgpack.packb([1, 2]), "a list was received that is no message of tft"),
        (msgpack.packb({}), "'somebody unnamed' sent a map without a version"),
        (spoilt(v=True), "without a version"),
        (spoilt(n=-1), "'node.1/0' sent a report with the number -1"),
        (spoilt(n="1"), "not a message of tft: Expected `int`, got `str` - at `$.n`"),
        (spoilt(extra=1), "not a message of tft: Object contains unknown field `extra`"),
        (spoilt(kind="Nonsense"), "'node.1/0' sent a message of kind 'Nonsense', which version"),
        (spoilt(kind="x" * 10_000), "…, which version"),
        (spoilt(body=[]), "not a message of tft: Expected `object`, got `array` - at `$.body`"),
        (
            spoilt(body={}),
            "a message of kind Beat that cannot be read: Object missing required field `node`",
        ),
        (
            spoilt_body(node="1"),
            "'node.1/0' sent a message of kind Beat that cannot be read: Expected `int`",
        ),
        (spoilt_body(mood="good"), "Unknown field - at `$.mood`"),
        (spoilt_body(at=float("nan")), "Expected a finite number, got `nan` - at `$.at`"),
        (
            spoilt_body(
                pulses=[
                    {
                        "rank": 2,
                        "incarnation": 0,
                        "position": {"step": 7, "window": False, "hour": 3},
                        "training": True,
                        "moved": 1.5,
                    }
                ]
            ),
            "Unknown field - at `$.pulses[0].position.hour`",
        ),
        (bytes(FRAME_LIMIT + 1), f"has at most {FRAME_LIMIT}"),
    ],
    ids=range(20),
)
def test_invalid_frame_is_refused_with_the_reason(frame: bytes, complaint: str) -> None:
    """When a frame is not a message of this version, then it is refused and one sentence gives the
    reason."""
    with pytest.raises(MalformedMessage) as refusal:
        codec.decode(frame)

    assert complaint in str(refusal.value)
    assert len(str(refusal.value)) < 500


@given(st.binary(max_size=200) | plain.map(codec.pack))
def test_arbitrary_bytes_raise_only_malformed_message(frame: bytes) -> None:
    """When arbitrary bytes arrive, then decoding raises `MalformedMessage` and no other exception."""
    with pytest.raises(MalformedMessage):
        codec.decode(frame)


def test_story_line_with_an_unknown_field_is_refused() -> None:
    """When a line of a story has a field that its message does not have, then the line is refused."""
    with pytest.raises(MalformedMessage, match="Unknown field"):
        codec.from_plain("Lead", {"epoch": 1, "heard": {}, "mood": "good"})


# ---------------------------------------------------------------- packing of plain values


@given(plain)
def test_plain_values_survive_packing(content: object) -> None:
    """When plain values are packed and unpacked, then the result is equal to the values."""
    assert codec.unpack(codec.pack(content)) == content


def test_packing_a_value_that_is_not_plain_names_its_type() -> None:
    """When a value that is not plain is packed, then packing is refused and the error names the
    type of the value."""
    with pytest.raises(UsageError, match="'set'"):
        codec.pack({"seen": {1, 2}})


def test_packing_a_value_that_contains_itself_is_refused() -> None:
    """When a value contains itself, then packing is refused with an error, and the process does not
    end."""
    ring: list[object] = []
    ring.append(ring)

    with pytest.raises(UsageError, match="recursion"):
        codec.pack(ring)
