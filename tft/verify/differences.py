"""
Compares the digests and rows that two runs have recorded, and names the first difference. All
functions are pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tft.verify.digests import Digests, Part

KINDS = (
    "batches", "data", "modes", "generators", "settings", "scheduler", "others", "rank-local",
    "losses", "optimizer", "parameters", "rows", "length",
)  # fmt: skip
"""All kinds of recorded state. Within a step, a difference of one kind can cause differences of the
kinds that come later in this list. So the first kind that differs is the most useful one to name.
"""

_TEXT = {
    "batches": "the inputs of the model differ",
    "data": "the data position differs",
    "generators": "a random generator differs",
    "modes": "modes of modules, or the description of the state, differ",
    "settings": "the settings of the optimizer's groups differ, such as the learning rate",
    "scheduler": "the scheduler differs",
    "others": "one of the other objects differs",
    "rank-local": "buffers of the forward pass differ, or other rank-local state",
    "losses": "the loss differs although the inputs are equal",
    "optimizer": "the state of the optimizer differs",
    "parameters": "the parameters differ",
    "rows": "the rows of session.record differ",
    "length": "the job trains more steps than the undisturbed one",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """
    A part of the state of one rank at one step that differs between two runs.
    """

    step: int
    rank: int
    kind: str
    name: str
    after: bool = False
    """True if the only rows that differ are those of functions that are called after the step
    (`session.evaluate`, `session.after_step`). After an incident in the next step these functions
    may be called again."""

    def sentence(self) -> str:
        """
        Return a text for messages that names the step, the rank and what differs.
        """
        named = f" ({self.name})" if self.name else ""
        return f"step {self.step}, rank {self.rank}: {_TEXT[self.kind]}{named}"


def first_difference(
    calm: Digests, other: Digests, *, volatile: Collection[str] = (), whole: bool = True
) -> Difference | None:
    """
    Return the first difference between the undisturbed run `calm` and the run `other`, or None if
    there is no difference.

    A rank that was killed has not recorded all its steps. So parts of a step that a rank has not
    recorded in the run `other` are not compared, except in the last step. If `whole` is False, the
    run `other` has failed: then only what it has recorded is compared, also in the last step.

    `volatile` are keys in the rows of `session.record`. Their values, such as times, are not
    compared, because they differ between any two runs.
    """
    found = [
        Difference(step=step, rank=rank, kind=kind, name=name)
        for (rank, step), parts in calm.steps.items()
        for kind, name in _unlike(
            parts, other.steps.get((rank, step), {}), whole and step == calm.last
        )
        if step <= calm.last
    ]
    found += _rows(calm, other, volatile, whole=whole)
    last = max(calm.ends.values(), default=0)
    found += [
        Difference(step=last + 1, rank=rank, kind="length", name=f"{end} instead of {last}")
        for rank, end in other.ends.items()
        if end > last
    ]
    return min(found, key=_order, default=None)


def volatile_keys(calm: Digests, again: Digests) -> frozenset[str]:
    """
    Return the keys whose values in the rows of `session.record` differ between two undisturbed
    runs.
    """
    keys: set[str] = set()
    for rank, rows in calm.rows.items():
        for row, twin in zip(rows, again.rows.get(rank, ()), strict=False):
            keys |= {key for key in row.keys() | twin.keys() if row.get(key) != twin.get(key)}
    return frozenset(keys - {"step", "after"})


def _order(difference: Difference) -> tuple[int, int, int, str]:
    return (
        difference.step,
        KINDS.index(difference.kind),
        difference.rank,
        difference.name,
    )


def _unlike(calm: Mapping[Part, str], other: Mapping[Part, str], last: bool) -> list[Part]:
    """
    Return the parts of the state that differ between the records of two runs. Both records are of
    the same rank and the same step.

    A step is recorded at two moments: at its update window and at its end. The parts of a moment
    are compared only if `other` has a record of that moment. If `last` is True, the parts of both
    moments are compared, and a part that only one run has recorded counts as different.
    """
    edges = {kind for kind, _ in other}
    window, end = "batches" in edges, "rank-local" in edges
    if last:
        window = end = True
    compared = {"batches", "losses", "data", "generators"} if window else set()
    if end:
        compared |= set(KINDS) - {"batches", "losses", "data", "generators"}
    return [
        part
        for part in sorted(calm.keys() | other.keys())
        if part[0] in compared and calm.get(part) != other.get(part)
    ]


def _rows(
    calm: Digests, other: Digests, volatile: Collection[str], *, whole: bool
) -> list[Difference]:
    found = []
    for rank, rows in calm.rows.items():
        expected, there = _by_step(rows, volatile), _by_step(other.rows.get(rank, ()), volatile)
        for step in sorted(expected.keys() | there.keys()):
            wanted, got = expected.get(step, []), there.get(step, [])
            if not whole:
                wanted = wanted[: len(got)]
            if wanted == got:
                continue
            name = "" if len(wanted) == len(got) else f"{len(got)} rows instead of {len(wanted)}"
            after = _trained(wanted) == _trained(got)
            found.append(Difference(step=step, rank=rank, kind="rows", name=name, after=after))
    return found


def _trained(rows: Collection[Mapping[str, Any]]) -> list[Mapping[str, Any]]:  # Any: parsed JSON
    """
    Return the rows of the step itself, without those of functions that are called after it.
    """
    return [row for row in rows if "after" not in row]


def _by_step(
    rows: Collection[Mapping[str, Any]], volatile: Collection[str]
) -> dict[int, list[dict[str, Any]]]:  # Any: parsed JSON
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        kept = {key: value for key, value in row.items() if key not in volatile}
        found.setdefault(row["step"], []).append(kept)
    return found
