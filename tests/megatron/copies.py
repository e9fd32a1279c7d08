"""
What each rank holds after each step, written down by the job: the digest of every shard, and of the parameters
that are made from them.
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
    The file of one rank.
    """

    def __init__(self, session: Any, model: Any) -> None:  # Any: `tft.Session`, Megatron's
        self._path = session.run_dir / f"copies-rank{session.rank}.jsonl"
        self._place = session.rank, session.world
        self._model = model

    def write(self, step: int) -> None:
        """
        What this rank holds now.
        """
        held = dict(self._shards()) | dict(self._parameters())
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "held": held}) + "\n")

    def _shards(self) -> Iterator[tuple[str, str]]:
        for shard in adaptor.tft_shards(*self._place):
            payload = adaptor.tft_give(shard.shard)
            found = xxhash.xxh3_128(payload.meta)
            for buffer in payload.buffers:
                found.update(buffer.view)
            yield shard.shard, found.hexdigest()

    def _parameters(self) -> Iterator[tuple[str, str]]:
        """
        Experts have other holders than the rest of the model.
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
    By step and shard, the digest that each of its holders wrote. A step that was taken again counts as it
    came out last.
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
