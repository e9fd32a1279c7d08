"""
The tables of `docs/reference/machine.md`, compared with the code.
"""

from dataclasses import fields
from pathlib import Path
from typing import get_args

from tft.core.job.orders import ORDERS, Failed, Late
from tft.core.job.policy import STRATEGIES, Policy
from tft.core.job.transitions import REACTIONS, TRANSITIONS, UNREACHABLE, Reaction, State
from tft.core.rank import transitions as rank
from tft.protocol.messages import OrderName

TEXT = (Path(__file__).parents[2] / "docs" / "reference" / "machine.md").read_text()


def section(title: str) -> str:
    """
    Return the text of the page under a heading.
    """
    return TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0] + "\n"


def rows(title: str) -> list[list[str]]:
    """
    Return the rows of the tables under a heading, without the header rows.
    """
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    ruled = [number for number, row in enumerate(cells) if set(row[0]) == {"-"}]
    return [
        row
        for number, row in enumerate(cells)
        if number not in {n + d for n in ruled for d in (-1, 0)}
    ]


def matrix() -> str:
    """
    Return the code's table of the reaction to every event in every state.
    """
    head = ["event", *(str(state) for state in State)]
    lines = [head, ["---"] * len(head)]
    lines += [[kind, *(str(row[state]) for state in State)] for kind, row in REACTIONS.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def orders() -> str:
    """
    Return the code's table of orders.
    """
    lines = [["order", "limit", "late", "most ranks late", "failed", "phase of the report"]]
    lines += [["---"] * 6]
    for name, rule in ORDERS.items():
        most_late = rule.most_late or rule.late
        lines += [
            [f"`{name}`", f"`{rule.limit}`", str(rule.late), str(most_late), str(rule.failed), rule.phase]
        ]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rank_orders() -> str:
    """
    Return the code's table of the reaction to every order in every stage of a training thread.
    """
    lines = [["order", *map(str, rank.Stage)], ["---"] * (1 + len(rank.Stage))]
    lines += [
        [f"`{order}`", *(str(row[stage]) for stage in rank.Stage)]
        for order, row in rank.REACTIONS.items()
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def unreachable() -> str:
    """
    Return the code's table of the events that cannot occur in a state, with the reasons.
    """
    states: dict[tuple[str, str], list[str]] = {}
    for (kind, state), why in UNREACHABLE.items():
        states.setdefault((kind, why), []).append(str(state))
    lines = [["event", "cannot come in", "because"], ["---"] * 3]
    lines += [[kind, _listed(named), why] for (kind, why), named in states.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _listed(states: list[str]) -> str:
    left = [str(state) for state in State if state not in states]
    return f"all but {' and '.join(left)}" if len(left) <= 2 else ", ".join(states)


def test_page_has_the_transitions_of_the_code() -> None:
    """When a state or a transition changes in the code, then the page has to change too."""
    drawn = {row[0]: row[2].split(", ") if row[2] else [] for row in rows("States")}
    assert drawn == {str(a): sorted(map(str, b)) for a, b in TRANSITIONS.items()}


def test_page_has_the_reaction_to_every_event_in_every_state() -> None:
    """When a reaction to an event changes in the code, then the page has to change too. The failure
    message shows the whole table, to be pasted into the page."""
    assert f"\n{matrix()}\n\n" in section("Every event in every state"), f"paste this:\n{matrix()}"


def test_page_has_the_impossible_events_with_their_reasons() -> None:
    """When an event becomes possible or impossible in a state, then the page has to change too. The
    failure message shows the whole table, to be pasted into the page."""
    there = f"\n{unreachable()}\n\n" in section("Every event in every state")
    assert there, f"paste this:\n{unreachable()}"
    assert {kind for kind, _ in UNREACHABLE} <= REACTIONS.keys()


def test_page_explains_every_reaction() -> None:
    """When the machine gets another kind of reaction, then the page has to explain it."""
    explained = {row[0] for row in rows("Every event in every state") if len(row) == 2}
    assert explained == {str(reaction) for reaction in Reaction}


def test_page_has_the_rule_of_every_order() -> None:
    """When the rule of an order changes, then the page has to change too. The failure message shows
    the whole table, to be pasted into the page."""
    assert f"\n{orders()}\n\n" in section("Orders"), f"paste this:\n{orders()}"
    assert set(ORDERS) == set(get_args(OrderName))


def test_page_has_the_reaction_of_a_rank_to_every_order() -> None:
    """When the reaction of a rank to an order changes, then the page has to change too. The failure
    message shows the whole table, to be pasted into the page."""
    drawn = section("What a rank does with an order")
    assert f"\n{rank_orders()}\n\n" in drawn, f"paste this:\n{rank_orders()}"
    assert set(rank.REACTIONS) == set(get_args(OrderName))
    assert all(set(row) == set(rank.Stage) for row in rank.REACTIONS.values())


def test_page_explains_the_stages_and_reactions_of_a_rank() -> None:
    """When a training thread gets another stage, or orders get another kind of reaction, then the
    page has to explain it."""
    two = [row for row in rows("What a rank does with an order") if len(row) == 2]
    three = [row for row in rows("What a rank does with an order") if len(row) == 3]
    assert [row[0] for row in two] == [*map(str, rank.Reaction)]
    assert {row[0]: row[2].split(", ") for row in three} == {
        str(stage): sorted(map(str, after)) for stage, after in rank.TRANSITIONS.items()
    }


def test_page_explains_every_reaction_to_an_answer() -> None:
    """When the machine gets another reaction to a late or failed answer, then the page has to
    explain it."""
    explained = [row[0] for row in rows("Orders") if len(row) == 2]
    assert explained == [*map(str, Late), *map(str, Failed)]


def test_page_names_the_strategies_and_their_limits() -> None:
    """When a strategy changes, or a limit that the page quotes in its text, then the page has to
    change too."""
    named = [row[0].strip("`") for row in rows("Strategies")]
    assert named == [*STRATEGIES, "exit"]
    policy = Policy()
    assert f"({policy.respawns} times per rank and incident)" in TEXT
    assert f"largest of {policy.stall_floor:.0f} s, {policy.stall_factor:.0f} median" in TEXT
    assert (
        f"more than {policy.flaps} incidents within {policy.flap_window / 60:.0f} minutes" in TEXT
    )
    assert policy.attempts == 3


def test_page_names_every_limit_with_its_value() -> None:
    """When a limit of the policy is added or changes, then the table of the page has to change too."""
    drawn = {row[0].strip("`"): row[1] for row in rows("Limits")}
    limits = {each.name: getattr(Policy(), each.name) for each in fields(Policy)}
    assert drawn == {
        name: f"{limit:g}"
        for name, limit in limits.items()
        if type(limit) in (int, float) and name not in ("checkpoint_every", "keep_checkpoints")
    }
