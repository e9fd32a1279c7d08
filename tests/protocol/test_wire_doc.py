"""
The page `docs/reference/wire.md` agrees with the code: every message, field and topic, and the
envelope.
"""

import re
import types
import typing
from collections import defaultdict
from dataclasses import fields, is_dataclass
from pathlib import Path

import msgpack
import pytest

from tft.protocol import codec, topics
from tft.protocol.frames import FRAME_LIMIT
from tft.protocol.messages import (
    MESSAGES,
    VERSION,
    Capture,
    Envelope,
    GroupStanding,
    Lead,
    Notice,
    Position,
    Pulse,
    SavedFile,
    ShardCopies,
    SliceDigest,
    Source,
    StepNumbers,
    StepWork,
    Transfer,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "wire.md"
RECORDS = (
    Position,
    ShardCopies,
    SavedFile,
    Pulse,
    SliceDigest,
    StepWork,
    GroupStanding,
    Source,
    Transfer,
    StepNumbers,
    Capture,
    Notice,
)


def tables() -> dict[str, list[list[str]]]:
    """
    Return the rows of the table under each heading, without the head of the table.
    """
    found: defaultdict[str, list[list[str]]] = defaultdict(list)
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif line.startswith("| `"):
            cells = [cell.strip() for cell in line.replace(r"\|", "¦").strip("|").split("|")]
            found[heading].append(cells)
    return found


def in_words(kind: typing.Any) -> str:  # Any: a type expression
    """
    Return the type of a field as the page writes it.
    """
    parts = typing.get_args(kind)
    match typing.get_origin(kind):
        case typing.Literal:
            return "one of " + ", ".join(f"`{word}`" for word in parts)
        case types.UnionType:
            return f"{in_words(parts[0])} or nil"
        case origin if origin is tuple:
            return f"list of {in_words(parts[0])}"
        case origin if origin is dict:
            return f"map of {in_words(parts[0])} to {in_words(parts[1])}"
    if is_dataclass(kind):
        name = typing.cast(type, kind).__name__
        return f"[{name}](#{name.lower()})"
    return {int: "integer", float: "float", str: "text", bool: "boolean"}[kind]


def test_headings_of_the_wire_page_are_the_messages_and_records() -> None:
    """When messages and records are defined, then the headings of `wire.md` name all of them in the
    same order."""
    headings = re.findall(r"^### (\w+)$", PAGE.read_text(), re.MULTILINE)

    assert headings == [kind.__name__ for kind in (*MESSAGES, *RECORDS)]


@pytest.mark.parametrize("kind", [*MESSAGES, *RECORDS], ids=lambda kind: kind.__name__)
def test_wire_page_has_every_field_with_its_type(kind: type) -> None:
    """When a message or record has fields, then its table on the page has each field, its type and
    a description."""
    rows = tables()[kind.__name__]

    assert [row[:2] for row in rows] == [
        [f"`{field.name}`", in_words(field.type)] for field in fields(kind)
    ]
    assert all(len(row) == 3 and row[2] for row in rows)


def test_wire_page_describes_the_envelope_and_the_version() -> None:
    """When the envelope has fields and a version, then the page has the same fields, the same
    version and the limit of a frame."""
    frame = codec.encode(
        Envelope(job="job", sender="run", number=0, message=Lead(epoch=1, heard={}))
    )
    rows = tables()["Frames"]

    assert [row[0] for row in rows] == [f"`{name}`" for name in msgpack.unpackb(frame)]
    assert f"Version of the protocol: {VERSION}." in rows[0][2]
    assert f"at most {FRAME_LIMIT // 2**20} MiB" in PAGE.read_text()


def test_wire_page_lists_every_topic() -> None:
    """When topics are defined, then the table of topics on the page has exactly these topics."""
    fixed = {name for name in vars(topics).values() if isinstance(name, bytes)}
    expected = {
        f"`{name.decode().replace('agent.0', 'agent.NODE')}`"
        for name in {*fixed, topics.agent(0), topics.presence("JOB", "SENDER")}
    }

    assert {row[0] for row in tables()["Topics"]} == expected
