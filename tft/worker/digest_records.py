"""
Digests of every step of a rank, so that two runs can be compared: `digests-rank{rank}.jsonl`.

    {"step": 7, "edge": "window", "batches": ["GPT:5f1c..."], "losses": ["90ab..."], "local": {"torch": "17..."}}
    {"step": 7, "edge": "end", "local": {"rank-local": "7a..."}, "state": {"dense/model": "c3..."}}
    {"step": 7, "edge": "after", "functions": ["evaluate"]}

The `edge` of a line says when it was written: when the update window closed, when the step ended,
or after functions were called. If a step is computed again, only its last lines are valid. A rank
has no lines for a step that it did not complete itself, because it was interrupted and got the
state from another rank.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pluggy
import xxhash

_LOCAL = "rank-local state"
"""The key of the digest of the whole rank-local state: generators, data position, and buffers that
the forward pass changes."""


class DigestRecords:
    """
    Writes the digests of one rank. All of its methods run on the training thread.

    `hook` has the adaptor's hooks. `state` returns digests of the training state, by shard and
    part.
    """

    def __init__(
        self,
        path: Path,
        hook: pluggy.HookRelay,
        state: Callable[[], Mapping[str, Mapping[str, str]]],
    ) -> None:
        self._path = path
        self._hook = hook
        self._state = state
        self._seen: dict[str, list[str]] = {"batch": [], "loss": []}

    def watch(self) -> None:
        """
        Begin to collect digests of batches and losses, if the adaptor implements the hook
        `tft_watch_batches`, which reports them.
        """
        self._hook.tft_watch_batches(seen=self._saw)

    def step_begins(self) -> None:
        """
        Drop the digests of batches and losses that were collected since the last line. They belong
        to an interrupted step, or to code that is not part of training, such as an evaluation.
        """
        self._seen = {"batch": [], "loss": []}

    def window_closed(self, step: int, captured: bytes) -> None:
        """
        Write the digests of the batches, losses and rank-local state that led to the update of
        `step`. `captured` is the rank-local state.
        """
        generators = self._hook.tft_generators() or {}
        self._write(
            step=step,
            edge="window",
            batches=self._seen["batch"],
            losses=self._seen["loss"],
            local={**generators, _LOCAL: _digest(captured)},
        )
        self.step_begins()

    def step_ended(self, step: int, captured: bytes) -> None:
        """
        Write the digests of the state at the end of `step`. `captured` is the rank-local state.
        """
        state = {
            f"{shard}/{part}": digest
            for shard, parts in self._state().items()
            for part, digest in parts.items()
        }
        self._write(step=step, edge="end", local={_LOCAL: _digest(captured)}, state=state)
        self.step_begins()

    def called_after(self, step: int, functions: Sequence[str]) -> None:
        """
        Write that these functions were called after `step`.
        """
        self._write(step=step, edge="after", functions=list(functions))
        self.step_begins()

    def _saw(self, kind: str, digest: str) -> None:
        self._seen[kind].append(digest)

    def _write(self, **row: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _digest(captured: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(captured)
