"""
The picture of the ranks as data: one letter for the state of each rank, and the ranks of each node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tft.launcher.situation import Facts, Oddity, oddities
from tft.sentences import ranks_of

STATES: Mapping[str, tuple[str, str]] = {
    "t": ("trains", "In the training loop, as far as the others."),
    "w": ("waits", "Has a heartbeat, and is not in the training loop: it starts, or has finished."),
    "b": ("behind", "Some steps behind the fastest rank, or without progress."),
    "s": ("slow", "Slower than its peers, by its own work."),
    "h": ("holds up", "Others wait for it, and the job stands still."),
    "z": ("stopped", "Its process is stopped (SIGSTOP)."),
    "x": ("silent", "No heartbeat of this rank arrives."),
    "f": ("at fault", "Has a fault in the open incident."),
    "o": ("left out", "Takes no part: the job goes on without it, or is over."),
    "u": ("not known", "Nothing is heard: the page has just begun, or no broker answers."),
}
"""Maps the letter of a state to the name and the meaning of the state."""
_ODD = {"silent": "x", "stopped": "z", "outside": "w", "behind": "b"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """
    A node in the picture.
    """

    node: int
    host: str
    ranks: str
    """The ranks of the node, written as ranges such as `0-7, 12`."""


def codes(
    facts: Facts, world: int, slow: Iterable[int], behind: Iterable[int], *, heard: bool
) -> str:
    """
    Return the letters of all ranks, in the order of the ranks. `slow` are the slow ranks, and
    `behind` the ranks that hold up the job. If a rank has several states, the one that comes last
    in this list counts: it trains or waits, is slow, stands out (see `oddities`), holds up the job,
    is at fault, is left out. `heard` is False as long as heartbeats cannot have arrived; then a
    missing heartbeat does not mean that the rank is silent.
    """
    found = bytearray(b"u" * world)

    def mark(ranks: Iterable[int], letter: str) -> None:
        for rank in ranks:
            if 0 <= rank < world:
                found[rank] = ord(letter)

    for each in facts["ranks"]:
        mark((each["rank"],), "t" if each["training"] else "w")
    mark(slow, "s")
    for odd in oddities(facts):
        if heard or odd.kind != "silent":
            mark((odd.rank,), _ODD[odd.kind])
    mark(behind, "h")
    incident = facts["open_incident"]
    faults = () if incident is None else incident["faults"]
    mark((fault["rank"] for fault in faults if fault["rank"] is not None), "f")
    mark(facts["ranks_left_out"], "o")
    return found.decode()


def layout(places: Mapping[int, int], hosts: Mapping[int, str], world: int) -> tuple[NodeRow, ...]:
    """
    Return the nodes with their ranks. `places` has the node of each rank.
    """
    ranks: dict[int, list[int]] = {}
    for rank in range(world):
        ranks.setdefault(places.get(rank, -1), []).append(rank)
    return tuple(
        NodeRow(node=node, host=hosts.get(node, ""), ranks=ranks_of(members).partition(" ")[2])
        for node, members in sorted(ranks.items())
    )


def counts(letters: str) -> list[tuple[str, str, int]]:
    """
    Return the letter, the name and the number of ranks of each state that some rank has.
    """
    return [(each, STATES[each][0], n) for each in STATES if (n := letters.count(each))]


def changes(before: str, after: str) -> list[tuple[int, str]]:
    """
    Return the ranks whose letter has changed, each with its new letter.
    """
    if before == after:
        return []
    return [
        (rank, new) for rank, (old, new) in enumerate(zip(before, after, strict=True)) if old != new
    ]


def reasons(facts: Facts) -> list[Oddity]:
    """
    Return the ranks that stand out, one by one. Leave out ranks without a heartbeat: another part
    of the page lists them together, because a lost node has many.
    """
    return [odd for odd in oddities(facts) if odd.kind != "silent"]
