"""
Converts messages to bytes and back: MessagePack on the wire, and plain values for a story's JSON
lines.

Only this module imports `msgpack`. Content from outside is checked by type, field by field, before
other code sees it. Invalid content raises `MalformedMessage`, with what came and from whom.
"""

import math
from typing import Any

import msgpack
import msgspec

from tft.errors import InternalError, MalformedMessage, UsageError
from tft.protocol.messages import MESSAGES, VERSION, Envelope, Message

FRAME_LIMIT = 64 * 2**20
"""
The maximum size of a frame in bytes. The largest message is a `Save` with the rank-local state of
ranks that cannot write their own: at most 512 KiB of hexadecimal for each rank, so a hundred ranks
fit. The state of models is never sent this way.
"""

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in MESSAGES}


class _Wire(
    msgspec.Struct, forbid_unknown_fields=True, rename={"sender": "from", "number": "n"}
):  # a struct, because `from` is a keyword in Python, and because structs check strictly
    v: int
    job: str
    sender: str
    number: int
    kind: str
    body: dict[str, Any]  # Any: its shape follows from `kind`, and is checked after that is known


# ---------------------------------------------------------------- the wire


def encode(envelope: Envelope) -> bytes:
    """
    Return the frame of an envelope.

    Text that UTF-8 cannot carry is written as an escape, so that no report stays unsent for this
    reason. An example is a lone surrogate out of a file name, in a traceback. Raises
    `InternalError` if the frame is larger than `FRAME_LIMIT`.
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
            f"a {type(envelope.message).__name__} of {envelope.sender} takes {len(frame)} bytes; "
            f"the limit of a frame is {FRAME_LIMIT}"
        )
    return frame


def decode(frame: bytes) -> Envelope:
    """
    Return the envelope in a frame. Raises `MalformedMessage` for any other content.
    """
    if len(frame) > FRAME_LIMIT:
        raise MalformedMessage(
            f"a frame of {len(frame)} bytes came; a message of tft has at most {FRAME_LIMIT}"
        )
    came = unpack(frame)
    if not isinstance(came, dict):
        raise MalformedMessage(
            f"a frame holds a {type(came).__name__} where a message of tft is a map"
        )
    sender = _brief(repr(came.get("from", "somebody unnamed")))
    _refuse_other_versions(came, sender)
    try:
        wire = msgspec.convert(came, _Wire)
    except msgspec.ValidationError as error:
        raise MalformedMessage(
            f"{sender} sent a frame that is not an envelope: {_brief(str(error))}"
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
    Refuse another version of the protocol. This is the first check, because another version may
    have any other field elsewhere. Raises `MalformedMessage`.
    """
    version = came.get("v")
    if type(version) is not int:
        raise MalformedMessage(
            f"{sender} sent a map without a version `v`, which is not a message of tft"
        )
    if version != VERSION:
        raise MalformedMessage(
            f"{sender} speaks version {version} of the protocol, version {VERSION} is spoken "
            "here: install the same tft on every node of the job"
        )


def _brief(words: str) -> str:
    """
    Return a text of at most 200 characters, so that a foreign text cannot fill the log.
    """
    return words if len(words) <= 200 else f"{words[:200]}…"


# ---------------------------------------------------------------- plain values


def to_plain(message: Message) -> tuple[str, dict[str, object]]:
    """
    Return the kind of a message, and its fields as values that JSON can carry.
    """
    plain: dict[str, object] = msgspec.to_builtins(message, str_keys=True)
    return type(message).__name__, plain


def from_plain(kind: str, body: dict[str, object]) -> Message:
    """
    Return the message that `to_plain` took apart, possibly after JSON. Raises `MalformedMessage`.
    """
    return _message(kind, body, str_keys=True)


def _message(kind: str, body: dict[str, Any], *, str_keys: bool) -> Message:  # Any: unchecked yet
    try:
        shape = _KINDS[kind]
    except KeyError:
        raise MalformedMessage(
            f"a message of kind {_brief(repr(kind))}, which version {VERSION} of the protocol does not have"
        ) from None
    try:
        message = msgspec.convert(body, shape, str_keys=str_keys)
    except msgspec.ValidationError as error:
        raise MalformedMessage(f"a {kind} that cannot be read: {error}") from None
    flaw = _flaw(body, msgspec.to_builtins(message, str_keys=str_keys), "$")
    if flaw is not None:
        raise MalformedMessage(f"a {kind} that cannot be read: {_brief(flaw)}")
    return message


def _flaw(came: object, known: Any, path: str) -> str | None:  # Any: follows the shape of `came`
    """
    Return what is wrong with a message that msgspec accepts: a field that a dataclass does not
    have, or a number that is not finite. None: nothing is wrong.
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


# ---------------------------------------------------------------- anything else that is packed


def pack(content: object) -> bytes:
    """
    Pack plain values into bytes: None, bool, int of 64 bits, float, str, bytes, and lists, tuples
    and dicts of them. Raises `UsageError` that names the value that is not plain.
    """
    try:
        packed: bytes = msgpack.packb(content)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            "only None, bool, int (64 bits), float, str, bytes, and lists and dicts of them can be "
            f"packed: {error}"
        ) from None
    return packed


def unpack(packed: bytes | memoryview) -> Any:  # Any: whatever was packed; the caller checks it
    """
    Unpack what `pack` packed. Tuples come back as lists. Raises `MalformedMessage`.

    Lengths are bounded by the number of bytes, and nesting by msgpack (1024). So a few bytes cannot
    ask for much memory or stack.
    """
    try:
        # keys may be no text: rank-local state has steps as keys, and a data position may have any
        return msgpack.unpackb(packed, strict_map_key=False)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedMessage(
            f"{len(packed)} bytes are not MessagePack: {str(error) or type(error).__name__}"
        ) from None
