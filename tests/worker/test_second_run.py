"""
A script that calls `session.run` twice. The test uses a real process with the fake adaptor, and acts
as the controller.
"""

from tests.agent.stage import Stage
from tests.worker.orders import done, key
from tft.protocol.messages import Complete, Exited, Ready

SCRIPT = """
import array
import tft
from tft.errors import UsageError


class Numbers:
    values = array.array("d", [0.0])

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


session = tft.init()
session.adopt(model=Numbers(), data=Numbers())
session.run(lambda session: None)
try:
    session.run(lambda session: None)
except UsageError as error:
    (session.run_dir / "refusal").write_text(str(error))
"""


async def test_second_call_of_run_is_refused(stage: Stage) -> None:
    """When a script calls `session.run` again after the job is complete, then it gets an error that
    says what to do, and does not wait for orders that never come."""
    await stage.agent(SCRIPT, adaptor="fake")
    await stage.start()
    await stage.report(Ready)
    await done(stage, Complete(**key(0, to=(0,))))
    assert (await stage.report(Exited)).code == 0
    refusal = (stage.run_dir / "refusal").read_text()
    assert refusal.startswith("session.run was called a second time, but a job trains with one")
    assert refusal.endswith("of which the second one loads a checkpoint of the first one")
