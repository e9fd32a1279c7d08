"""
Tests of the lines `report group list` in rank 0's output.

The lines show operators which ranks hold copies of which state.
"""

from pathlib import Path

import pytest
from mindio_ttp import replicas

from tests.mindio.test_jobs import run

PAIRS = [{"rank_list": [n, n + 2], "replica_cnt": 2, "replica_shift": 0} for n in range(2)]
WORDS = "report group list:"


def test_each_group_is_logged_once_with_its_lowest_reporting_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """When ranks have reported their groups, then there is one line for each group, with the lowest
    rank that reported it, as MindIO's controller logs it. A second kind of state has lines of its
    own."""
    kinds = {rank: [(0, [0, 1, 2, 3], 2), (1, [rank % 2, rank % 2 + 2], 2)] for rank in range(4)}
    replicas.announce(kinds)
    said = [
        line.partition('event="')[2].rstrip('"') for line in capsys.readouterr().out.splitlines()
    ]
    assert said == [
        "rank:0, report group list: [0, 1, 2, 3]",
        "rank:0, report group list: [0, 2]",
        "rank:1, report group list: [1, 3]",
    ]


@pytest.mark.soak
def test_rank_0_logs_the_groups_of_all_ranks(tmp_path: Path) -> None:
    """When a job begins, then only rank 0's output has the groups of all ranks. A replacement of
    rank 0 has them in its own output."""
    outcome = run(tmp_path, [0, 4, "loop", "kill"], groups=PAIRS)
    assert outcome.codes == [0], outcome.output
    written = sorted((outcome.directory / "run" / "logs").glob("rank-*.log"))
    assert len(written) == 5  # rank 0 was replaced once, so it has two logs
    for path in written:
        found = [line for line in path.read_text().splitlines() if WORDS in line]
        expected = [(0, [0, 2]), (1, [1, 3])] if path.name.startswith("rank-0") else []
        ends = [f'rank:{rank}, {WORDS} {ranks}"' for rank, ranks in expected]
        assert [line.partition('event="')[2] for line in found] == ends, path.name
