"""
The interface of MindIO TFT 7.3.0's Python packages, read from `reference.toml`.
"""

import inspect
import tomllib
from pathlib import Path
from typing import Any

MODULES: dict[str, Any] = tomllib.loads(Path(__file__).with_name("reference.toml").read_text())[
    "modules"
]
"""The exports, constants, functions and classes of each module, by its name. Any: TOML."""


def functions() -> dict[str, Any]:  # Any: TOML
    """
    Return the reference entry of each function, by the full path of the function.
    """
    return {
        f"{module}.{name}": entry
        for module, told in MODULES.items()
        for name, entry in told.get("functions", {}).items()
    }


def registrars() -> list[str]:
    """
    Return the names of the functions that register a program's function together with its context.
    """
    return sorted(
        path.rpartition(".")[2]
        for path, entry in functions().items()
        if entry["takes"] == "(func, ctx=None)"
    )


def shape(function: Any) -> str:  # Any: any function
    """
    Return the parameters of a function with their defaults, without types.
    """
    parameters = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
    ]
    return str(inspect.Signature(parameters))
