"""
Records of the state that each rank holds after each step.

The job writes, per rank and step, the digest of every shard and of the model's parameters.
`test_copies.py` reads and compares these digests.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron.core.parallel_state as ps
import torch.distributed as dist
import xxhash
from tft_megatron import adaptor
from tft_pytorch.part_digests import digest
from tft_pytorch.tensor_holders import named_after


class Copies:
    """
    The writer of one rank's file `copies-rank<R>.jsonl` in the run directory.
    """

    def __init__(self, session: Any, model: Any) -> None:  # Any: `tft.Session`, Megatron's
        self._path = session.run_dir / f"copies-rank{session.rank}.jsonl"
        self._place = session.rank, session.world
        self._model = model

    def write(self, step: int) -> None:
        """
        Append the digests of the shards and parameters that this rank holds after `step`.
        """
        held = dict(self._shards()) | dict(self._parameters())
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "held": held}) + "\n")

    def _shards(self) -> Iterator[tuple[str, str]]:
        for shard in adaptor.tft_shards(*self._place):
            payload = adaptor.tft_give(shard.shard, 0, kept=False)
            found = xxhash.xxh3_128(payload.meta)
            for buffer in payload.buffers:
                found.update(buffer.view)
            yield shard.shard, found.hexdigest()

    def _parameters(self) -> Iterator[tuple[str, str]]:
        """
        Yield the digest of the dense parameters and, if the model has experts, that of the experts.

        The two are separate because different ranks hold the experts and the rest of the model. The
        name of each digest contains the ranks that hold the same values.
        """
        parameters = {name: p.detach() for name, p in self._model.named_parameters()}
        experts = {n: p for n, p in parameters.items() if ".experts." in n}
        rest = {n: p for n, p in parameters.items() if n not in experts}
        summed = ps.get_data_parallel_group(with_context_parallel=True)
        yield f"parameters.{named_after(_ranks(summed))}", digest(None, rest)
        if experts:
            apart = _ranks(ps.get_expert_data_parallel_group())
            yield f"experts.{named_after(apart)}", digest(None, experts)


def _ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def read(run_dir: Path) -> dict[int, dict[str, dict[int, str]]]:
    """
    Return, by step and shard, the digest that each holding rank wrote.

    If a step was trained several times, only the last digest is kept.
    """
    found: dict[int, dict[str, dict[int, str]]] = {}
    for path in sorted(run_dir.glob("copies-rank*.jsonl")):
        rank = int(path.stem.removeprefix("copies-rank"))
        for step, held in _rows(path):
            for shard, told in held.items():
                found.setdefault(step, {}).setdefault(shard, {})[rank] = told
    return found


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, str]]]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row["step"], row["held"]
