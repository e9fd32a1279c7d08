"""
Reads from a YAML file of MindSpore Transformers which ranks of a job hold the same state, and where
the checkpoints are. The rest of the file is ignored. If a setting makes it impossible for tft to
protect the job, this module raises an error that names the key of the setting.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Any

from tft.errors import UsageError
from tft.spi import Parallelism
from tft_mindspore import environment

_SIZES = ("model_parallel", "pipeline_stage", "context_parallel", "expert_parallel")
"""The keys in the section `parallel_config` for all sizes of the parallelism except
`data_parallel`. A missing key means the size 1."""
_WHOLE_GROUP = -1
"""The default value of `optimizer_weight_shard_size`: each rank of a data-parallel group holds
another part of the optimizer state."""
_THRESHOLD_KB = 64
"""The default value of `parallel_optimizer_threshold`, in KB."""
_SHARD_SIZE = "parallel.parallel_optimizer_config.optimizer_weight_shard_size"
_WORLD = 1_000_000
"""The largest number of ranks that is accepted. A larger number must be a typing error."""
_FEW = 8
"""The largest number of allowed values of a setting that an error message lists."""
_WHOLE_EPOCH = -1
"""The value of `sink_size` with which MindSpore runs all steps of an epoch as one unit."""
_MONITOR = "CheckpointMonitor"
"""The callback of MindSpore Transformers that writes checkpoints."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """
    The sizes of the parallelism of a job. In a usable job, at least two ranks hold each part of the
    state.
    """

    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    shards: int = 1
    """The number of shards into which each data-parallel group cuts its parameters and their
    optimizer state."""
    threshold_kb: int = 0
    """The size in KB below which a parameter is not cut into shards. 0 if no parameter is cut."""

    @property
    def world(self) -> int:
        """
        Return how many ranks the job has.
        """
        return self.dp * self.tp * self.pp * self.cp

    @property
    def group(self) -> int:
        """
        Return how many ranks a data-parallel group has.
        """
        return self.dp * self.cp

    @property
    def parts(self) -> int:
        """
        Return how many different parts of the state the ranks of a data-parallel group hold.
        """
        return self.shards * self.ep

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """
        Return the groups of ranks that hold exactly the same state. Each rank of a group can
        continue from a checkpoint file of another rank of the group.

        From one rank to the next, the tensor-parallel index changes fastest, then the index in the
        data-parallel group, then the pipeline stage. Within a data-parallel group, every `ep`-th
        rank has the same experts. Of the ranks with the same experts, every `shards`-th rank has
        the same shard of the experts and of the dense parameters.
        """
        return tuple(
            tuple(
                (stage * self.group + place) * self.tp + tensor
                for place in range(part, self.group, self.parts)
            )
            for stage in range(self.pp)
            for part in range(self.parts)
            for tensor in range(self.tp)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """
    The settings that are read from a YAML file of MindSpore Transformers. Paths are not changed:
    they may be relative.
    """

    sizes: Sizes
    output: Path = Path("output")
    """The directory for checkpoints and for strategies, MindSpore's files that say how parameters
    are cut."""
    prefix: str | None = None
    """The beginning of the names of checkpoints. None if no callback writes checkpoints."""
    load: Path | None = None
    """The checkpoint that the job loads at its start, or a directory with one directory for each
    rank."""
    resume: bool = False
    """True if training continues at the step of the loaded checkpoint."""
    resume_file: str | None = None
    """The name of the file to continue from. None means the newest file."""
    strategy: Path | None = None
    """The file, or directory of files, that says how the parameters are cut in the loaded
    checkpoint."""
    strategy_file: Path | None = None
    """The file in which this job records how it cuts its parameters."""
    monitor_config: Mapping[str, object] = field(default_factory=dict)
    """The settings by which the callback `TrainFaultTolerance` checks the norm of the gradients.
    Empty if the norm is not checked."""

    @property
    def checkpoints(self) -> Path:
        """
        Return the path under which this job writes a directory for each rank.
        """
        return self.output / "checkpoint"


def read_recipe(file: Path) -> Recipe:
    """
    Read a YAML file of MindSpore Transformers. Raises `UsageError` for a value that cannot be used.
    The message has the file, the key and the expected value.
    """
    document = _Section(file, "", _parsed(file))
    _check_run(document)
    parallel = document.section("parallel")
    sizes = _sizes(file, document, parallel)
    load = document.path("load_checkpoint")
    resume, resume_file = _resumption(document, load)
    return Recipe(
        sizes=sizes,
        output=document.path("output_dir") or Path("output"),
        prefix=_prefix(document),
        load=load,
        resume=resume,
        resume_file=resume_file,
        strategy=document.path("src_strategy_path_or_dir"),
        strategy_file=_strategy_file(parallel),
        monitor_config=_monitor(document, file),
    )


def _monitor(document: "_Section", file: Path) -> Mapping[str, object]:
    """
    Return the settings in `monitor_config` that are for the check of the norm of the gradients.
    Return an empty mapping if this check is off.
    """
    section = document.section("monitor_config")
    if section is None:
        return {}
    found = section.values((environment.CHECKS, environment.THRESHOLD))
    limit = environment.norm_limit(found, f"{file}: monitor_config")
    return {} if limit is None else found


class _Section:
    """
    A mapping in the YAML file, with its path within the file.
    """

    # Any: `content` was parsed from YAML and is not yet checked
    def __init__(self, file: Path, name: str, content: Mapping[Any, Any]) -> None:
        self._file = file
        self._name = name
        self._content = content

    def section(self, key: str) -> "_Section | None":
        """
        Return the mapping under the key `key` of this mapping. Return None if the key is missing.
        Raises `UsageError` if the value is no mapping.
        """
        if key not in self._content:
            return None
        found = self._content[key]
        if not isinstance(found, dict):
            raise self._wrong(key, "a mapping")
        return _Section(self._file, self._path(key), found)

    def values(self, keys: Iterable[str]) -> dict[str, object]:
        """
        Return the values under the keys `keys` of this mapping. Leave out keys that are missing.
        """
        return {key: self._content[key] for key in keys if key in self._content}

    def number(self, key: str, least: int = 1, besides: int | None = None) -> int | None:
        """
        Return the whole number under the key `key` of this mapping. Return None if the key is
        missing. The value must be at least `least`, or equal to `besides`. Raises `UsageError` for
        another value.
        """
        if key not in self._content:
            return None
        found = self._content[key]
        whole = isinstance(found, int) and not isinstance(found, bool)
        if not whole or (found < least and found != besides):
            other = "" if besides is None else f", or {besides}"
            raise self._wrong(key, f"a whole number of {least} or more{other}")
        return int(found)

    def flag(self, key: str, *, absent: bool = False) -> bool:
        """
        Return the value, True or False, under the key `key` of this mapping. Return `absent` if the
        key is missing. Raises `UsageError` for another value.
        """
        found = self._content.get(key, absent)
        if not isinstance(found, bool):
            raise self._wrong(key, "True or False")
        return found

    def text(self, key: str) -> str | None:
        """
        Return the text under the key `key` of this mapping. Return None if the key is missing or
        its text is empty. Raises `UsageError` if the value is no text.
        """
        found = self._content.get(key)
        if found is None or found == "":
            return None
        if not isinstance(found, str):
            raise self._wrong(key, "a text")
        return found

    def name_or_flag(self, key: str) -> str | bool:
        """
        Return the value under the key `key` of this mapping, which must be a text, True or False.
        Return False if the key is missing or the text is empty. Raises `UsageError` for another
        value.
        """
        return self.text(key) or False if self._is_text(key) else self.flag(key)

    def path(self, key: str) -> Path | None:
        """
        Return the path under the key `key` of this mapping. Return None if the key is missing or
        its text is empty. Raises `UsageError` if the value is no text.
        """
        found = self.text(key)
        return None if found is None else Path(found)

    def sections(self, key: str) -> "list[_Section]":
        """
        Return the mappings in the list under the key `key` of this mapping. Return an empty list if
        the key is missing. Raises `UsageError` for another value.
        """
        found = self._content.get(key)
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise self._wrong(key, "a list of mappings")
        path = self._path(key)
        return [_Section(self._file, f"{path}[{at}]", each) for at, each in enumerate(found)]

    def _is_text(self, key: str) -> bool:
        return isinstance(self._content.get(key), str)

    def refused(self, key: str, why: str) -> UsageError:
        """
        Return the error for a key whose value tft cannot support. `why` is the part of the message
        that says what is expected instead, and why.
        """
        return UsageError(f"{self._file}: {self._path(key)} is {self._content[key]!r}; {why}")

    def missing(self, key: str, expected: str) -> UsageError:
        """
        Return the error for a key that is missing.
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
    Return whether the optimizer is divided among ranks (parallel optimizer).

    The setting is `enable_parallel_optimizer` in the section `parallel`. Older files have it as
    `optimizer_shard` in the section `parallel_config`, which is `sizes`. If either setting is on,
    return True. A divided optimizer is the safe assumption, because then fewer ranks hold the same
    state.
    """
    older = sizes.flag("optimizer_shard")
    return (parallel is not None and parallel.flag("enable_parallel_optimizer")) or older


def _strategy_file(parallel: _Section | None) -> Path | None:
    """
    Return the path of the file in which the job records how it divides parameters among ranks.
    Newer YAML files name this path in the section `strategy_ckpt_config`.
    """
    if parallel is None:
        return None
    newer = parallel.section("strategy_ckpt_config")
    return (newer and newer.path("save_file")) or parallel.path("strategy_ckpt_save_file")


def _sizes(file: Path, document: _Section, parallel: _Section | None) -> Sizes:
    config = document.section("parallel_config")
    if config is None:
        raise document.missing("parallel_config", "the sizes of the parallelism")
    dp = config.number("data_parallel")
    if dp is None:
        raise config.missing("data_parallel", "a whole number of 1 or more")
    tp, pp, cp, ep = (config.number(key) or 1 for key in _SIZES)
    if dp * tp * pp * cp > _WORLD:
        raise UsageError(f"{file}: a job has at most {_WORLD} ranks, not {dp * tp * pp * cp}")
    whole = Sizes(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
    sizes = _cut(file, whole, parallel) if _is_cut(config, parallel) else whole
    if not _held_twice(sizes.group, sizes.parts):
        raise _without_replica(file, sizes, _alone(sizes), _ways(sizes))
    return sizes


def _cut(file: Path, whole: Sizes, parallel: _Section | None) -> Sizes:
    """
    Return a copy of the sizes `whole` with the number of shards into which the optimizer state is
    cut.

    Raises `UsageError` if the optimizer state is cut over the whole data-parallel group. In this
    case each rank has a different shard, and no other rank has a copy of it.
    """
    config = None if parallel is None else parallel.section("parallel_optimizer_config")
    shards, threshold = None, None
    if config is not None:
        shards = config.number("optimizer_weight_shard_size", besides=_WHOLE_GROUP)
        threshold = config.number("parallel_optimizer_threshold", least=0)
    if shards is None or shards == _WHOLE_GROUP:
        given = "not given" if shards is None else str(shards)
        alone = (
            f"{_SHARD_SIZE} is {given}, so each parameter is cut over the whole of its "
            f"data-parallel group of {whole.group} ranks"
        )
        uncut = replace(whole, shards=whole.group)
        raise _without_replica(file, uncut, alone, _fewer(uncut) or [_twice_as_many(whole)])
    if threshold is None:
        threshold = _THRESHOLD_KB
    return replace(whole, shards=shards, threshold_kb=threshold)


def _without_replica(file: Path, sizes: Sizes, alone: str, ways: list[str]) -> UsageError:
    """
    Return the error for sizes with which some part of the state is held by only one rank. `alone`
    describes this problem, and `ways` are settings that would solve it, for the message.
    """
    if sizes.shards > 1 and _held_twice(sizes.group, sizes.ep):
        ways = [*ways, "parallel.enable_parallel_optimizer to False"]
    return UsageError(f"{file}: no replica: {alone}; set {_either(ways)}")


def _alone(sizes: Sizes) -> str:
    group, of = sizes.group, f"(data_parallel {sizes.dp} * context_parallel {sizes.cp})"
    if group == 1:
        return f"a data-parallel group has 1 rank {of}, and no other rank holds the same state"
    held = "cannot be given evenly to" if group % sizes.parts else "are held once each by"
    return (
        f"{sizes.parts} different parts of the state (optimizer_weight_shard_size {sizes.shards} * "
        f"expert_parallel {sizes.ep}) {held} the {group} ranks of a data-parallel group {of}"
    )


def _ways(sizes: Sizes) -> list[str]:
    enough = _enough(sizes)
    if replace(sizes, dp=enough).world > _WORLD:
        return _fewer(sizes) or [_twice_as_many(sizes)]
    return [f"parallel_config.data_parallel to {enough}", *_fewer(sizes)]


def _fewer(sizes: Sizes) -> list[str]:
    most = min(sizes.shards - 1, sizes.group // (2 * sizes.ep))
    fewer = [
        str(shards) for shards in range(2, most + 1) if _held_twice(sizes.group, shards * sizes.ep)
    ]
    few = fewer if len(fewer) <= _FEW else [*fewer[: _FEW - 1], fewer[-1]]
    return [f"{_SHARD_SIZE} to {_either(few)}"] if few else []


def _twice_as_many(whole: Sizes) -> str:
    """
    Return a text for a message that proposes two shards of the optimizer state, and the smallest
    `data_parallel` with which at least two ranks hold each shard.
    """
    enough = _enough(replace(whole, shards=2))
    return f"parallel_config.data_parallel to {enough} and {_SHARD_SIZE} to 2"


def _enough(sizes: Sizes) -> int:
    """
    Return the smallest data parallelism (`dp`) with which at least two ranks hold each part of the
    state.
    """
    step = sizes.parts // gcd(sizes.parts, sizes.cp)
    return step if step * sizes.cp > sizes.parts else 2 * step


def _held_twice(group: int, parts: int) -> bool:
    return group % parts == 0 and group > parts


def _either(ways: list[str]) -> str:
    *others, last = ways
    return f"{', '.join(others)} or {last}" if others else last


def _check_run(document: _Section) -> None:
    """
    Check the settings of the run. Raises `UsageError` if MindSpore would run several steps as one
    unit, because tft could not know in which step a fault came. Also raises `UsageError` if the run
    would train no step.
    """
    runner = document.section("runner_config")
    if runner is not None and runner.flag("sink_mode", absent=True):
        size = runner.number("sink_size", besides=_WHOLE_EPOCH)
        if size not in (None, 1):
            raise runner.refused(
                "sink_size",
                "expected is 1: with another value MindSpore runs several steps as one unit, so "
                "tft cannot know in which step a fault came, and after a fault the ranks could "
                "have the states of different steps",
            )
    if document.flag("only_save_strategy"):
        raise document.refused(
            "only_save_strategy", "expected is False: the run would end before it trains a step"
        )


def _resumption(document: _Section, load: Path | None) -> tuple[bool, str | None]:
    """
    Return whether training continues at the step of a checkpoint, and the name of the checkpoint
    file. The name is None if the YAML file gives none. `load` is the checkpoint to begin with.

    Raises `UsageError` if training is to continue and `load` is None.
    """
    named = document.name_or_flag("resume_training")
    if named and load is None:
        raise document.refused(
            "resume_training", "a load_checkpoint from which to continue is expected with it"
        )
    return bool(named), named if isinstance(named, str) else None


def _prefix(document: _Section) -> str | None:
    """
    Return the prefix of the names of the checkpoints that the run writes. Return None if the run
    writes no checkpoints. Raises `UsageError` if the setting `integrated_save` is on, with which
    ranks gather whole parameters for a checkpoint.
    """
    for callback in document.sections("callbacks"):
        if callback.text("type") != _MONITOR:
            continue
        if callback.flag("integrated_save"):
            raise callback.refused(
                "integrated_save",
                "expected is False: parameters cannot be gathered for a last checkpoint from ranks "
                "that are gone",
            )
        return callback.text("prefix") or "CKP"
    return None


def _parsed(file: Path) -> Mapping[Any, Any]:  # Any: YAML may have any keys and values
    try:
        import yaml
    except ImportError:
        raise UsageError(f"to read {file}, PyYAML is needed: pip install 'tft-bus[yaml]'") from None
    try:
        content = yaml.safe_load(file.read_bytes())
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # the except clause names ValueError, because PyYAML raises it for an impossible date such
        # as 2026-13-32
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UsageError(f"{file} is {_short(content)}; expected is a mapping with parallel_config")
    return content


def _short(found: object) -> str:
    text = "empty" if found is None else repr(found)
    return text if len(text) <= 60 else f"{text[:60]}…"


def read_parallelism(file: Path) -> Parallelism:
    """
    Return the sizes of the job that a YAML file of MindSpore Transformers describes.

    Raises `UsageError` if the file or its sizes cannot be used.
    """
    sizes = read_recipe(file).sizes
    return Parallelism(
        framework="MindSpore",
        dp=sizes.dp,
        tp=sizes.tp,
        pp=sizes.pp,
        cp=sizes.cp,
        ep=sizes.ep,
        shards=sizes.shards,
        threshold_kb=sizes.threshold_kb,
        cuts_parameters=True,
        experts_as_dense=True,
    )
