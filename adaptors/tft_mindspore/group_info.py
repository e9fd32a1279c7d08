"""
Reads and writes the file `group_info.pb` of MindSpore. The file of a rank names the groups in which
the rank communicates, and the ranks that hold the same state as this rank. MindSpore writes such a
file for each rank if the environment variable `GROUP_INFO_FILE` is set. MindSpore's function
`restore_group_info_list` reads these files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tft.errors import UsageError
from tft_mindspore.rank_files import put


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """
    The content of one file `group_info.pb`, in which MindSpore says which ranks hold the same
    parameters.
    """

    replicas: tuple[int, ...]
    """The ranks that hold the same state as the rank for which the file was written. This rank is
    among them."""
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The process groups by name, each with the ranks that communicate in the group."""


def read_group_info(file: Path) -> GroupInfo:
    """
    Return the content of a `group_info.pb`. Raises `UsageError`, with the reason, if the file
    cannot be read or is not valid.
    """
    message, broken = _messages()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    found = message()
    try:
        found.ParseFromString(content)
        understood = found.IsInitialized()  # protobuf returns True if all required fields exist
    except broken:
        understood = False
    if not understood:
        what = "is not a group_info.pb of MindSpore, or damaged" if content else "is empty"
        raise UsageError(f"{file} {what}")
    replicas = tuple(found.ckpt_restore_rank_list.dim)
    if not replicas or len(set(replicas)) < len(replicas):
        raise UsageError(
            f"{file} lists {list(replicas)} as the ranks that hold the same state; the list must "
            "name different ranks, each once"
        )
    return GroupInfo(
        replicas=replicas,
        groups={
            item.group_name: tuple(item.parallel_group_ranks.dim)
            for item in found.parallel_group_item
        },
    )


def write_group_info(file: Path, info: GroupInfo) -> None:
    """
    Write the content `info` to the path `file` as a `group_info.pb`, and sync the file to disk.
    Raises `UsageError` if protobuf is not installed.
    """
    message, _ = _messages()
    made = message()
    for name, ranks in info.groups.items():
        item = made.parallel_group_item.add()
        item.group_name = name
        item.parallel_group_ranks.dim.extend(ranks)
        item.parallel_group_ranks.SetInParent()
    made.ckpt_restore_rank_list.dim.extend(info.replicas)
    made.ckpt_restore_rank_list.SetInParent()
    put(file, lambda draft: draft.write_bytes(made.SerializeToString()))


@cache
def _messages() -> tuple[Any, type[Exception]]:  # Any: protobuf makes this class at run time
    """
    Return the protobuf class of the content of a `group_info.pb`, and the exception that the class
    raises when it parses other content.

    Raises `UsageError` if protobuf is not installed.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
    except ImportError:
        raise UsageError(
            "reading and writing group_info.pb needs protobuf: pip install 'tft-bus[protobuf]'"
        ) from None
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="tft/group_info.proto", package="tft.group_info", syntax="proto2"
    )

    def add(name: str, *fields: tuple[str, int, int, str]) -> None:
        made = file.message_type.add(name=name)
        for number, (called, label, kind, of) in enumerate(fields, 1):
            named = {"type_name": f".{file.package}.{of}"} if of else {}
            made.field.add(name=called, number=number, label=label, type=kind, **named)

    one, several = field.LABEL_REQUIRED, field.LABEL_REPEATED
    add("Ranks", ("dim", several, field.TYPE_UINT32, ""))
    add(
        "Group",
        ("group_name", one, field.TYPE_STRING, ""),
        ("parallel_group_ranks", one, field.TYPE_MESSAGE, "Ranks"),
    )
    add(
        "GroupInfo",
        ("parallel_group_item", several, field.TYPE_MESSAGE, "Group"),
        ("ckpt_restore_rank_list", one, field.TYPE_MESSAGE, "Ranks"),
    )
    # Use a separate pool of protobuf messages, because MindSpore in the same process registers the
    # same messages under other names in the shared pool.
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    whole = pool.FindMessageTypeByName(f"{file.package}.GroupInfo")
    return message_factory.GetMessageClass(whole), message.DecodeError
