"""
The parallelism a MindSpore Transformers YAML file asks for. Of the file, only what decides who holds
what is read.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tft.core.layout import Layout, Scheme
from tft.errors import UsageError

_SIZES = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
"""What may be left out of `parallel_config`, where it is 1."""
_WHOLE_GROUP = -1
"""What `optimizer_weight_shard_size` is unless it is given: cut over the whole group."""
_THRESHOLD_KB = 64
"""What `parallel_optimizer_threshold` is unless it is given."""
_SHARD_SIZE = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"


def read_layout(file: Path) -> Layout:
    """
    The layout of the job that such a file describes. Raises `UsageError`, with the file, the key and
    what is expected there.
    """
    document = _Section(file, "", _parsed(file))
    sizes = document.section("parallel_config")
    if sizes is None:
        raise document.missing("parallel_config", "the sizes of the parallelism")
    parallel = document.section("parallel")
    dp = sizes.number("data_parallel")
    if dp is None:
        raise sizes.missing("data_parallel", "a whole number of 1 or more")
    tp, pp, cp, ep = (sizes.number(key) or 1 for key in _SIZES)
    shards, threshold = _cut(file, parallel, dp * cp) if _is_cut(sizes, parallel) else (1, 0)
    try:
        return Layout(
            dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, shards=shards, threshold_kb=threshold,
            scheme=Scheme.MINDSPORE,
        )  # fmt: skip
    except UsageError as refused:
        raise UsageError(f"{file}: {refused}") from None


class _Section:
    """
    A mapping in the file, and where it is.
    """

    def __init__(self, file: Path, name: str, content: Mapping[Any, Any]) -> None:  # Any: as found
        self._file = file
        self._name = name
        self._content = content

    def section(self, key: str) -> "_Section | None":
        """
        The mapping under a key, None where there is no such key.
        """
        if key not in self._content:
            return None
        found = self._content[key]
        if not isinstance(found, dict):
            raise self._wrong(key, "a mapping")
        return _Section(self._file, self._path(key), found)

    def number(self, key: str, least: int = 1, besides: int | None = None) -> int | None:
        """
        The whole number under a key, None where there is no such key.
        """
        if key not in self._content:
            return None
        found = self._content[key]
        whole = isinstance(found, int) and not isinstance(found, bool)
        if not whole or (found < least and found != besides):
            other = "" if besides is None else f", or {besides}"
            raise self._wrong(key, f"a whole number of {least} or more{other}")
        return int(found)

    def flag(self, key: str) -> bool:
        """
        Whether a key is there and true.
        """
        found = self._content.get(key, False)
        if not isinstance(found, bool):
            raise self._wrong(key, "True or False")
        return found

    def missing(self, key: str, expected: str) -> UsageError:
        """
        What to raise where a key has to be there.
        """
        return UsageError(f"{self._file}: {self._path(key)} is missing; expected is {expected}")

    def _wrong(self, key: str, expected: str) -> UsageError:
        found = self._content[key]
        return UsageError(
            f"{self._file}: {self._path(key)} is {_short(found)}; expected is {expected}"
        )

    def _path(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key


def _is_cut(sizes: _Section, parallel: _Section | None) -> bool:
    """
    Whether the optimizer is parallel. Older files say so beside the sizes; where the two differ, the
    one that leaves fewer copies is believed.
    """
    older = sizes.flag("optimizer_shard")
    return (parallel is not None and parallel.flag("enable_parallel_optimizer")) or older


def _cut(file: Path, parallel: _Section | None, group: int) -> tuple[int, int]:
    """
    Into how many shards it is cut, and from how many KB on.
    """
    config = None if parallel is None else parallel.section("parallel_optimizer_config")
    shards, threshold = None, None
    if config is not None:
        shards = config.number("optimizer_weight_shard_size", besides=_WHOLE_GROUP)
        threshold = config.number("parallel_optimizer_threshold", least=0)
    if shards is None or shards == _WHOLE_GROUP:
        given = "not given" if shards is None else str(shards)
        raise UsageError(
            f"{file}: no replica: {_SHARD_SIZE} is {given}, so each parameter is cut over the "
            f"whole of its data-parallel group of {group} ranks; expected is a number that "
            "divides it, and is at most half of it"
        )
    return shards, _THRESHOLD_KB if threshold is None else threshold


def _parsed(file: Path) -> Mapping[Any, Any]:  # Any: whatever the file holds
    try:
        import yaml
    except ImportError:
        raise UsageError(f"to read {file}, PyYAML is needed: pip install 'tft-bus[yaml]'") from None
    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: 2026-13-32
        raise UsageError(f"{file} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} is {_short(content)}; expected is a mapping with parallel_config")
    return content


def _short(found: object) -> str:
    text = "empty" if found is None else repr(found)
    return text if len(text) <= 60 else f"{text[:60]}…"
