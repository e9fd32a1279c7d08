"""
Converts the settings of a job to command-line options and back. The settings are the fields of a
dataclass in `tft.config`. Each option is derived from its field, so each setting is declared only
once.
"""

import ast
import inspect
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import click

from tft.config import JobSettings

LOOPBACK = "127.0.0.1"
"""The default address at which processes listen. Only processes of the same machine can connect to
this address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """
    A field of a settings class: its name, type, default and description.
    """

    name: str
    type: object
    default: object
    """The default. `dataclasses.MISSING` if the setting has none and is required."""
    sentence: str
    """The description of the field: the string below its declaration."""

    @property
    def option(self) -> str:
        """
        The name of the option on a command line.
        """
        return "--" + self.name.replace("_", "-")


class Names(click.ParamType[tuple[str, ...]]):
    """
    The click type of an option whose value is a list of words with commas between them.
    """

    name = "name,…"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in str(value).split(",") if word.strip())
        if not words:
            self.fail("name at least one value, or several with commas between them", param, ctx)
        return words


def settings_of(declared: type) -> tuple[Setting, ...]:
    """
    Return a `Setting` for each field of the dataclass `declared`, in the order of the fields.
    """
    types = get_type_hints(declared)
    sentences = _sentences(declared)
    return tuple(
        Setting(
            name=field.name,
            type=types[field.name],
            default=field.default,
            sentence=sentences[field.name],
        )
        for field in fields(declared)
    )


def job_options(*, given: bool) -> list[click.Parameter]:
    """
    Return one command-line option for each setting of a job.

    `given` says what happens when the user leaves out an option that has no default. If `given` is
    True, this is an error. If `given` is False, the option has the value None, and the caller
    chooses a value.
    """
    return [_option(setting, given=given) for setting in settings_of(JobSettings)]


def job_settings(options: Mapping[str, object]) -> JobSettings:
    """
    Return the settings of a job. `options` maps the names of the command-line options to their
    values, as click has parsed them.
    """
    chosen = {setting.name: options[setting.name] for setting in settings_of(JobSettings)}
    return JobSettings(**chosen)  # type: ignore[arg-type]  # click has converted the values


def job_arguments(settings: JobSettings) -> list[str]:
    """
    Return command-line arguments that a command with the options of `job_options` converts back to
    `settings`.
    """
    arguments: list[str] = []
    for setting in settings_of(JobSettings):
        value = getattr(settings, setting.name)
        if value == setting.default:
            continue
        if setting.type is bool:
            arguments.append(setting.option)
            continue
        arguments += [setting.option, ",".join(value) if isinstance(value, tuple) else str(value)]
    return arguments


def _option(setting: Setting, *, given: bool) -> click.Option:
    # Any: each click type converts to another Python type
    kinds: Mapping[object, click.ParamType[Any]] = {
        str: click.STRING,
        int: click.INT,
        bool: click.BOOL,
        Path: click.Path(path_type=Path),
        Path | None: click.Path(path_type=Path),
        tuple[str, ...]: Names(),
    }
    kind = kinds[setting.type]
    if setting.default is MISSING:
        return click.Option([setting.option], type=kind, required=given, help=setting.sentence)
    return click.Option(
        [setting.option],
        type=kind,
        is_flag=setting.type is bool,
        default=setting.default,
        show_default=setting.type is not bool and setting.default not in ((), None),
        help=setting.sentence,
    )


def _sentences(declared: type) -> dict[str, str]:
    """
    Return the descriptions of the fields of a settings class, by field name. A description is the
    string below the declaration of the field.

    Python does not keep these strings at run time, so this function parses the source of the class.
    """
    [tree] = ast.parse(inspect.getsource(declared)).body
    assert isinstance(tree, ast.ClassDef)
    sentences: dict[str, str] = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(sentence))),
            ):
                sentences[name] = " ".join(sentence.split())
            case _:
                pass
    return sentences
