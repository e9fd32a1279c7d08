"""
Converts messages to bytes and back.

On the bus, a message is encoded as MessagePack. In the story (the recorded events of a run), a
message is a line of JSON. So this file also converts messages to and from plain values, such as
dicts and lists.

Only this file imports `msgpack`. The types of all received fields are checked before other code
sees the message. An invalid message raises `MalformedMessage`, which says what was received and
from which sender.
"""

import math
from typing import Any

import msgpack
import msgspec

from tft.errors import InternalError, MalformedMessage, UsageError
from tft.protocol.frames import FRAME_LIMIT
from tft.protocol.messages import MESSAGES, VERSION, Envelope, Message

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES}
"""The class of a message, by the name of the class, which is the field `kind` of a frame."""


class _Wire(
    msgspec.Struct, forbid_unknown_fields=True, rename={"sender": "from", "number": "n"}
):  # a struct, which can rename a field: `from`, the name in a frame, is a Python keyword
    v: int
    job: str
    sender: str
    number: int
    kind: str
    body: dict[str, Any]  # Any: the fields of the body depend on `kind`; `_message` checks them


# ---------------------------------------------------------------- messages as bytes


def encode(envelope: Envelope) -> bytes:
    """
    Return the bytes of an envelope (a message with its sender), as they are sent on the bus.

    A character that UTF-8 cannot represent, such as a lone surrogate in a file name of a traceback,
    is written as an escape sequence, so that the message can still be sent. Raises `InternalError`
    if the result is larger than `FRAME_LIMIT`.
    """
    frame: bytes = msgpack.packb(
        {
            "v": VERSION,
            "job": envelope.job,
            "from": envelope.sender,
            "n": envelope.number,
            "kind": type(envelope.message).__name__,
            "body": msgspec.to_builtins(envelope.message),
        },
        unicode_errors="backslashreplace",
    )
    if len(frame) > FRAME_LIMIT:
        raise InternalError(
            f"the message {type(envelope.message).__name__} of {envelope.sender} has {len(frame)} "
            f"bytes, and cannot be sent: a message may have at most {FRAME_LIMIT} bytes"
        )
    return frame


def decode(frame: bytes) -> Envelope:
    """
    Decode the bytes of a received frame, and return the envelope (a message with its sender).

    Raises `MalformedMessage` if the bytes are not a valid envelope of this version of the protocol.
    """
    if len(frame) > FRAME_LIMIT:
        raise MalformedMessage(
            f"a message of {len(frame)} bytes was received; a message of tft has at most "
            f"{FRAME_LIMIT} bytes"
        )
    came = unpack(frame)
    if not isinstance(came, dict):
        raise MalformedMessage(
            f"a {type(came).__name__} was received that is no message of tft: a message is always "
            "a map"
        )
    sender = _brief(repr(came.get("from", "somebody unnamed")))
    _refuse_other_versions(came, sender)
    try:
        wire = msgspec.convert(came, _Wire)
    except msgspec.ValidationError as error:
        raise MalformedMessage(
            f"{sender} sent a map that is not a message of tft: {_brief(str(error))}"
        ) from None
    if wire.number < 0:
        raise MalformedMessage(
            f"{sender} sent a report with the number {wire.number}; report numbers start at 1"
        )
    try:
        message = _message(wire.kind, wire.body, str_keys=False)
    except MalformedMessage as error:
        raise MalformedMessage(f"{sender} sent {error}") from None
    return Envelope(job=wire.job, sender=wire.sender, number=wire.number, message=message)


def _refuse_other_versions(came: dict[object, object], sender: str) -> None:
    """
    Check the version of the protocol in a received frame.

    This check comes before all others, because the other fields may differ in another version.
    Raises `MalformedMessage` if the version is missing or is not `VERSION`.
    """
    version = came.get("v")
    if type(version) is not int:
        raise MalformedMessage(
            f"{sender} sent a map without a version `v`, which is not a message of tft"
        )
    if version != VERSION:
        raise MalformedMessage(
            f"{sender} uses version {version} of the protocol between tft's processes, but this "
            f"process uses version {VERSION}: install the same tft on every node of the job"
        )


def _brief(words: str) -> str:
    """
    Return the text `words`, cut to 200 characters and an ellipsis, so that a long text from another
    process cannot fill the log.
    """
    return words if len(words) <= 200 else f"{words[:200]}…"


# ---------------------------------------------------------------- messages as plain values


def to_plain(message: Message) -> tuple[str, dict[str, object]]:
    """
    Return the name of a message's class, and its fields as values that JSON can represent.
    """
    plain: dict[str, object] = msgspec.to_builtins(message, str_keys=True)
    return type(message).__name__, plain


def from_plain(kind: str, body: dict[str, object]) -> Message:
    """
    Return the message whose class has the name `kind` and whose fields have the values `body`. This
    is the inverse of `to_plain`. The values may have been stored as JSON in between.

    Raises `MalformedMessage` if the values do not form a valid message.
    """
    return _message(kind, body, str_keys=True)


# Any: the values in `body` are not checked yet
def _message(kind: str, body: dict[str, Any], *, str_keys: bool) -> Message:
    try:
        shape = _KINDS[kind]
    except KeyError:
        raise MalformedMessage(
            f"a message of kind {_brief(repr(kind))}, which version {VERSION} of the protocol does "
            "not have"
        ) from None
    try:
        message = msgspec.convert(body, shape, str_keys=str_keys)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"a message of kind {kind} that cannot be read: {error}") from None
    flaw = _flaw(body, msgspec.to_builtins(message, str_keys=str_keys), "$")
    if flaw is not None:
        raise MalformedMessage(f"a message of kind {kind} that cannot be read: {_brief(flaw)}")
    return message


# Any: `known` has the same nested lists and dicts as `came`
def _flaw(came: object, known: Any, path: str) -> str | None:
    """
    Return a text about an error in received fields that msgspec does not detect, or None if there
    is no such error.

    Such an error is a field that the dataclass does not have, or a number that is not finite.
    `came` is the received value. `known` is the same value after its conversion to the message and
    back, so it has no unknown fields. `path` says where `came` is in the message, for the text.
    """
    match came:
        case dict():
            for name, value in came.items():
                if name not in known:
                    return f"Unknown field - at `{path}.{name}`"
                flaw = _flaw(value, known[name], f"{path}.{name}")
                if flaw is not None:
                    return flaw
        case list() | tuple():
            for index, (value, twin) in enumerate(zip(came, known, strict=True)):
                flaw = _flaw(value, twin, f"{path}[{index}]")
                if flaw is not None:
                    return flaw
        case float() if not math.isfinite(came):
            return f"Expected a finite number, got `{came}` - at `{path}`"
        case _:
            pass
    return None


# ---------------------------------------------------------------- other packed values


def pack(content: object) -> bytes:
    """
    Encode plain values as MessagePack bytes.

    Plain values are None, bool, int of 64 bits, float, str, bytes, and lists, tuples and dicts of
    plain values. Raises `UsageError` if `content` contains any other value; the message of the
    error names that value.
    """
    try:
        packed: bytes = msgpack.packb(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            "only None, bool, int (64 bits), float, str, bytes, and lists and dicts of them can be "
            f"packed: {error}"
        ) from None
    return packed


# Any: any plain value may have been packed; the caller checks its type
def unpack(packed: bytes | memoryview) -> Any:
    """
    Decode the result of `pack`. A tuple comes back as a list.

    Raises `MalformedMessage` if the bytes are not valid MessagePack. The input is not trusted, but
    a short input cannot make msgpack use much memory or stack: msgpack refuses a length that
    exceeds the number of bytes, and more than 1024 levels of nesting.
    """
    try:
        # allow keys that are not text: the keys of rank-local states are step numbers, and the
        # user's data position may have keys of any type
        return msgpack.unpackb(packed, strict_map_key=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(
            f"{len(packed)} bytes are not MessagePack: {str(error) or type(error).__name__}"
        ) from None
