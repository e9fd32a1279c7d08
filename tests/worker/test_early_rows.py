"""
Rows that a script writes before it trains. The test uses real processes with the fake adaptor, and
acts as the controller.
"""

import json

from tests.agent.stage import Stage
from tests.worker.orders import BOTH, enter
from tft.protocol.messages import Finished, Ready

SCRIPT = """
import array
import tft
from tft.errors import UsageError
from tft.testing.adaptor import group


class Numbers:
    values = array.array("d", [0.0])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


session = tft.init()
refusals = []


def write(place):
    for function in (session.record, session.log):
        try:
            function({"number": 1})
        except UsageError as error:
            refusals.append(f"{place}: {error}")


def train(session):
    for step in session.steps(3):
        if step == 1:
            session.record({"refusals": refusals})
        session.record({"at": step})
        group().add(1.0)
        with session.update():
            pass


write("top")
session.adopt(model=Numbers(), data=Numbers(), wrap=lambda: write("wrap"))
write("adopted")
session.run(train)
"""


async def test_rows_before_the_training_loop_are_refused(stage: Stage) -> None:
    """When a script records or logs before its training loop, then it gets an error that says where
    to do it, and no row is written. In the loop, the rows of step 1 are kept."""
    await stage.agent(SCRIPT, nproc=2, adaptor="fake")
    for rank in BOTH:
        await stage.start(rank=rank)
        await stage.report(Ready, rank=rank)
    await enter(stage, 0, 0)
    for rank in BOTH:
        await stage.report(Finished, rank=rank)
        lines = (stage.run_dir / f"records-rank{rank}.jsonl").read_text().splitlines()
        first, *others = map(json.loads, lines)
        assert others == [{"step": step, "at": step} for step in (1, 2, 3)]
        found = [
            each.partition(" was called before the training loop")[0] for each in first["refusals"]
        ]
        assert found == [
            f"{place}: session.{call}"
            for place in ("top", "adopted", "wrap")
            for call in ("record", "log")
        ]
        assert all("call it in the loop" in each for each in first["refusals"])
        assert not (stage.run_dir / f"values-rank{rank}.jsonl").exists()
