"""
Reads and restores random generators of Python and numpy, for adaptors: the global generators of a
process, and generators that are attributes of the user's objects. The states can be packed into
bytes (`tft.spi.pack`).

This module needs numpy, so `tft.spi` does not import it.
"""

import json
import random
from collections.abc import Collection, Mapping
from typing import Any

import numpy

from tft.errors import UsageError

GLOBAL = ("python", "numpy")
"""The names of the global generators. It takes 8 us to read the state of Python's generator, and 26
us to read that of numpy's."""


def check_names(names: Collection[str], known: Collection[str]) -> None:
    """
    Check the argument `rng` that the user has given, the names of random generators. Raises
    `UsageError` if one of these `names` is not in `known`.
    """
    unknown = [each for each in names if each not in known]
    if unknown:
        raise UsageError(
            f"the argument rng has the unknown names {', '.join(unknown)}; known are "
            f"{', '.join(known)}"
        )


# ---------------------------------------------------------------- the global generators


def global_states(names: Collection[str] = GLOBAL) -> dict[str, Any]:  # Any: states differ in type
    """
    Return, by name, the states of the global generators that `names` contains. Ignore all other
    names.
    """
    state: dict[str, Any] = {}
    if "python" in names:
        state["python"] = random.getstate()
    if "numpy" in names:
        name, words, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = [name, numpy.asarray(words).tobytes(), *rest]
    return state


def restore_global(state: Mapping[str, Any]) -> None:
    """
    Restore the global generators whose states are in `state`. This is a result of `global_states`,
    which may have been packed and unpacked since. Ignore all other entries.
    """
    if "python" in state:
        random.setstate(python_state(state["python"]))
    if "numpy" in state:
        numpy.random.set_state(numpy_state(state["numpy"]))


def python_state(packed: Any) -> tuple[Any, ...]:
    """
    Return the state of a Python generator in the form that `random.setstate` takes. In `packed`,
    lists may stand in the place of tuples, as after packing.
    """
    version, words, gauss = packed
    return version, tuple(words), gauss


def numpy_state(packed: Any) -> tuple[Any, ...]:
    """
    Return the state of numpy's global generator in the form that `numpy.random.set_state` takes.
    `packed` is the entry `numpy` of a result of `global_states`.
    """
    name, words, *rest = packed
    return name, numpy.frombuffer(words, numpy.uint32), *rest


# ---------------------------------------------------------------- generators of objects


def kind_of(value: object) -> str:
    """
    Return the kind of a random generator: `numpy`, `numpy.RandomState` or `python`. Return an empty
    text for any other object.
    """
    if isinstance(value, numpy.random.Generator):
        return "numpy"
    if isinstance(value, numpy.random.RandomState):
        return "numpy.RandomState"
    return "python" if isinstance(value, random.Random) else ""


def read(generator: Any) -> list[str]:
    """
    Return the kind of a generator and its state, as text. Raises `NotImplementedError` if the state
    cannot be read.
    """
    kind = kind_of(generator)
    if kind == "numpy":
        state = generator.bit_generator.state
    else:
        state = generator.getstate() if kind == "python" else generator.get_state(legacy=False)
    return [kind, json.dumps(state, default=numpy.ndarray.tolist)]


def put_back(generator: Any, state: str) -> None:
    """
    Restore a generator to `state`, the second part of a result of `read`.
    """
    told = json.loads(state)
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = told
    elif isinstance(generator, numpy.random.RandomState):
        generator.set_state(told)
    else:
        generator.setstate(python_state(told))


def made(kind: str, state: str) -> Any:
    """
    Return a new generator of a kind, restored to `state`.
    """
    if kind == "numpy":
        maker = getattr(numpy.random, json.loads(state)["bit_generator"])
        generator: Any = numpy.random.Generator(maker())
    else:
        generator = random.Random() if kind == "python" else numpy.random.RandomState()
    put_back(generator, state)
    return generator
