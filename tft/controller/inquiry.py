"""
Asks all ranks where they stand when no rank makes progress. From the answers it concludes which
ranks hold up the others, and tells operators. A standstill is not a fault yet: if it lasts,
`HangDetection` reports a fault.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import structlog

from tft.core.link.standstill import Finding, Standstill
from tft.core.link.step_times import Moves, StepTimes
from tft.files import write_whole
from tft.protocol.messages import Beat, Inquire, Whereabouts

log = structlog.get_logger()


class Tell(Protocol):
    """
    Tells operators and plugins about an event.
    """

    def __call__(self, event: str, **facts: object) -> None: ...


class Inquiry:
    """
    The questions of one controller to the ranks about a standstill, and the conclusions from the
    answers.

    `ask` publishes a question, and `tell` tells operators about an event.
    """

    def __init__(
        self, run_dir: Path, times: StepTimes, ask: Callable[[Inquire], None], tell: Tell
    ) -> None:
        self._logs = run_dir / "logs"
        self._ask = ask
        self._tell = tell
        self._standstill = Standstill(times)

    def resumed(self, at: float) -> None:
        """
        Record that training begins or continues at the time `at`.
        """
        self._standstill.resumed(at)

    def heard(self, beat: Beat, moves: Moves, at: float, epoch: int) -> None:
        """
        Record the heartbeat `beat` of a node, and its `moves`, the progress of the ranks since the
        heartbeat before. If no rank has made progress for long, ask all ranks where they stand.
        """
        if self._standstill.heard(beat, moves, at):
            self._ask(Inquire(epoch=epoch, number=self._standstill.number))
        self._conclude(at)

    def answered(self, answer: Whereabouts, at: float) -> None:
        """
        Record the answer of a rank.
        """
        self._standstill.answered(answer, at)
        self._conclude(at)

    def _conclude(self, at: float) -> None:
        finding = self._standstill.finding(at)
        if finding is None:
            return
        file = self._write(finding)
        silence = round(finding.silence, 3)
        self._tell(
            "job_stands", seconds=silence, ranks=[odd.rank for odd in finding.odd], stacks=file
        )
        for odd in finding.odd:
            self._tell("rank_behind", rank=odd.rank, line=odd.line, why=odd.why, seconds=silence)

    def _write(self, finding: Finding) -> str:
        """
        Write the stacks of all ranks to a file in the run directory. Return the path of the file,
        or an empty text if the file cannot be written.
        """
        number = 1 + len(list(self._logs.glob("stacks-*.txt")))
        path = self._logs / f"stacks-{number}.txt"
        text = "\n".join(map(_described, finding.answers))
        try:
            write_whole(path, text)
        except (OSError, UnicodeError) as error:
            log.warning("stacks_not_written", path=str(path), why=str(error))
            return ""
        return str(path)


def _described(answer: Whereabouts) -> str:
    position = answer.position
    groups = "".join(
        f"  group {each.group!r} of {each.size} ranks ({each.members}): {each.entered} collectives entered"
        f"{f', waits in {each.inside}' if each.inside else ''}\n"
        for each in answer.groups
    )
    return (
        f"rank {answer.rank} (process {answer.incarnation}) after step {position.step}, "
        f"{'waits for other ranks' if answer.waiting else 'waits for no other rank'}, "
        f"at {answer.line or 'no line of the script'}\n{groups}{answer.stack}"
    )
