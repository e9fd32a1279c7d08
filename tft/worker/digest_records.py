"""
Writes digests of every step of a rank to `digests-rank{rank}.jsonl`, so that two runs can be
compared. `edge` names the moment: the update window or the step ended, or functions were called
after the step.

    {"step": 7, "edge": "window", "batches": ["GPT:5f1c..."], "losses": ["90ab..."], "local": {"torch": "17..."}}
    {"step": 7, "edge": "end", "local": {"rank-local": "7a..."}, "state": {"dense/model": "c3..."}}
    {"step": 7, "edge": "after", "functions": ["evaluate"]}

If a step is computed again, the file has lines of both attempts, and the later lines are the valid
ones. A rank that was interrupted in a step, and took the end of that step from another rank, has
no lines for that step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pluggy
import xxhash

_LOCAL = "rank-local state"
"""The name of the digest of all rank-local state: generators, data position, and buffers of the
forward pass."""


class DigestRecords:
    """
    Writes the digests of one rank. All of its methods run on the training thread.

    `state` returns digests of the training state, by shard and part.
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
        Begin to watch the batches and losses, if the adaptor can.
        """
        self._hook.tft_watch_batches(seen=self._saw)

    def step_begins(self) -> None:
        """
        Forget the batches and losses seen since the last window. They belong to no step, or to a
        step that was interrupted.
        """
        self._seen = {"batch": [], "loss": []}

    def window_closed(self, step: int, captured: bytes) -> None:
        """
        Write the batches, losses and rank-local state that led to the update of `step`. `captured`
        is the rank-local state.
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
