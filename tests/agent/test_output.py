"""
The output of ranks: complete in the log files, in whole lines on the agent's stdout, without delay
of any rank.
"""

import os
import re

from tests.agent.stage import PAGE, Stage, gone
from tft.protocol.messages import EndNode, Exited

TALK = """
import os, random, sys
rank = int(os.environ["RANK"])
shuffle = random.Random(rank)
text = "".join(f"{rank}:{line}:" + "x" * shuffle.randrange(3000) + "\\n" for line in range(2000))
data = text.encode() + b"\\xff\\x00 and no newline"
while data:  # in pieces that end anywhere, from both ends of the process
    count = shuffle.randrange(1, 70000)
    data = data[os.write(shuffle.choice([1, 2]), data[:count]):]
"""


async def test_lines_of_several_ranks_do_not_mix(stage: Stage) -> None:
    """When two ranks write much output at once, then each has its complete raw log, and the shown
    output has only complete lines of one rank each."""
    agent = await stage.agent(TALK, nproc=2)
    for rank in range(2):
        await stage.start(rank=rank)
    for rank in range(2):
        await stage.report(Exited, rank=rank)
    stage.order(EndNode(epoch=1, grace=1.0, why="done"))
    await gone(agent.pid)
    shown = (stage.tmp / "out").read_bytes()
    assert shown.endswith(b"\n")

    for rank in range(2):
        raw = (stage.run_dir / "logs" / f"rank-{rank}.0.log").read_bytes()
        assert raw.endswith(b"\xff\x00 and no newline")
        assert len(re.findall(rb"(?m)^%d:\d+:x*$" % rank, raw)) == 2000
        prefix = b"[rank %d] " % rank
        lines = [line.removeprefix(prefix) for line in shown.split(b"\n") if line[:9] == prefix]
        assert b"\n".join(lines) == raw
    assert all(line.startswith(b"[rank ") for line in shown.split(b"\n")[:-1])


async def test_very_long_line_is_shown_in_parts(stage: Stage) -> None:
    """When a rank writes a line that never ends, then its output is shown in several parts."""
    agent = await stage.agent("import os; os.write(1, b'=' * 200_000)")
    await stage.start()
    await stage.report(Exited)
    stage.order(EndNode(epoch=1, grace=1.0, why="done"))
    await gone(agent.pid)
    shown = (stage.tmp / "out").read_text().splitlines()

    assert "".join(line.removeprefix("[rank 0] ") for line in shown) == "=" * 200_000
    assert len(shown) > 1


async def test_full_terminal_does_not_block_the_ranks(stage: Stage) -> None:
    """When the agent's stdout is full, then the ranks and the heartbeats continue. The number of
    lines that are not shown is printed."""
    reading, writing = os.pipe()
    agent = await stage.agent(
        PAGE + "line = b'y' * 999 + b'\\n'\n"
        "for _ in range(200): os.write(1, line * 100)\n"
        "say(1); signal.pause()",
        stdout=writing,
    )
    os.close(writing)
    await stage.start()
    await stage.said(1)
    log = stage.run_dir / "logs" / "rank-0.0.log"
    while log.stat().st_size < 20_000_000:
        await stage.beat()

    agent.terminate()  # while the pipe to the console is full
    with os.fdopen(reading, "rb") as output:
        shown = output.read().splitlines()
    await gone(agent.pid)
    left_out = [line for line in shown if line.startswith(b"[tft] ")]

    assert len(left_out) == 1
    assert len(shown) - 1 + int(left_out[0].split()[1]) == 20_000
    assert set(shown) - set(left_out) == {b"[rank 0] " + b"y" * 999}
