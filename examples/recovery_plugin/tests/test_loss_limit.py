"""
The plugin beside the real judgement of tft: no process, no socket, and no time passes.
"""

from tft_loss_limit import LIMIT, SPARE, LossLimit

from tft.core.job.policy import Policy
from tft.testing.scripted import ScriptedJob


def test_a_rank_that_is_lost_for_the_third_time_ends_the_job_with_a_checkpoint() -> None:
    """
    When one rank loses its process a third time, then the job is saved and ends. Until then, and
    when other ranks lose theirs, the plugin leaves the decision to tft.
    """
    plugin = LossLimit({LIMIT: "3"})
    job = ScriptedJob(4, Policy(advised=True)).start()
    for rank in (2, 1, 2):
        job.train()
        job.kill(rank)
        job.settle()
        assert job.ask(plugin) is None
        job.settle()
        job.train()
    assert [incident["strategy"] for incident in job.reports()] == ["recover"] * 3
    job.kill(2)
    job.settle()
    advice = job.ask(plugin)
    assert advice is not None
    assert advice.why == "rank 2 has lost its process 3 times; the limit is 3"
    job.settle()
    assert job.over is not None
    assert (job.over.result, job.over.code) == ("dumped", 3)


def test_repeated_request_for_advice_does_not_count_a_loss_twice() -> None:
    """When another rank is lost in the same incident, then the plugin is asked again, and the first
    loss still counts once."""
    plugin = LossLimit({LIMIT: "2"})
    job = ScriptedJob(4, Policy(advised=True)).start()
    job.train()
    job.kill(2)
    job.settle()
    job.kill(1)
    job.settle()
    assert job.ask(plugin) is None
    assert job.ask(plugin) is None


def test_plugin_waits_for_a_spare_node() -> None:
    """When a node is lost and no other node has room for its ranks, then the plugin asks for time,
    and the ranks start on the spare node that joins."""
    plugin = LossLimit({SPARE: "60"})
    job = ScriptedJob(4, Policy(advised=True), placement={0: (0, 1), 1: (2, 3)}).start()
    job.train()
    job.lose_node(1)
    job.settle()
    advice = job.ask(plugin)
    assert advice is not None
    assert advice.why == "a spare node is awaited: its agent has ended"
    job.spare[2] = 2
    job.come(2)
    job.wait()
    assert job.ask(plugin) is None
    job.settle()
    job.train()
    assert [incident["strategy"] for incident in job.reports()] == ["recover"]


def test_plugin_stops_waiting_when_its_limit_is_over() -> None:
    """When no spare node joins, then the plugin waits only for its configured time, and tft
    decides."""
    plugin = LossLimit({SPARE: "2"})
    job = ScriptedJob(4, Policy(advised=True), placement={0: (0, 1), 1: (2, 3)}).start()
    job.train()
    job.lose_node(1)
    job.settle()
    for _ in range(2):
        assert job.ask(plugin) is not None
        job.wait()
    assert job.ask(plugin) is None
    job.settle()
    assert job.over is not None
    assert job.over.result == "dumped"
