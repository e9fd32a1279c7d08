"""
What `tft run` decides and refuses before it starts anything.
"""

import socket
from pathlib import Path
from typing import Any

import pytest

from tft.bus.ports import check_free, free_address
from tft.config import JobSettings
from tft.errors import AddressTaken, UsageError
from tft.launcher.plan import LEADER, Plan, check_open, check_plan, check_settings, make_plan, named
from tft.launcher.run_directory import run_dir_of, write_job


def plan(node: int = 0, **job: Any) -> Plan:  # Any: each setting's own type
    """
    A plan of a job of two nodes.
    """
    settings = JobSettings(
        job="j", run_dir=Path("/d"), broker="127.0.0.1:29400", nnodes=2, nproc_per_node=4, **job
    )
    return Plan(
        settings=settings,
        node=node,
        host="127.0.0.1",
        insecure=False,
        report=None,
        script="train.py",
        arguments=("--steps", "60"),
    )


def options(**chosen: Any) -> dict[str, Any]:  # Any: each option's own type
    """
    The options of `tft run` as click hands them over, where only these were given.
    """
    return {
        "job": None,
        "run_dir": None,
        "broker": None,
        "nnodes": 1,
        "nproc_per_node": 1,
        "adaptor": "pytorch",
        "enable": (),
        "max_incidents": 100,
        "max_rank_faults": 5,
        "replace_nodes": False,
        "spread_savers": False,
        "skip_batch": False,
        "checkpoint_every": 0,
        "checkpoint_dir": None,
        "checkpoint_name": "step-{step:08d}",
        "keep_checkpoints": 0,
        "save_copies": "one",
        "curve": None,
        "audit": "first",
        "resume": False,
        "resume_if_any": False,
        "led_elsewhere": False,
        "spare": 0,
        "spare_if_taken": False,
        "module": False,
        "placed": None,
        "starter": None,
        "node_rank": 0,
        "host": "127.0.0.1",
        "insecure": False,
        "report": None,
        "script": "train.py",
        "arguments": (),
        **chosen,
    }


def test_node_0_starts_broker_and_controller_too() -> None:
    """
    When the job has two nodes, then the first starts all parts and the second only its agent.
    """
    assert list(plan(0).commands()) == ["broker", "controller", "agent-0"]
    assert list(plan(1).commands()) == ["agent-1"]


def test_the_script_comes_last_with_all_its_arguments() -> None:
    """
    When an agent is started, then what follows the script is the script's.
    """
    assert plan(1).commands()["agent-1"][-3:] == ["train.py", "--steps", "60"]


def test_a_restarted_broker_is_told_the_same_address() -> None:
    """
    When the address of the broker is known, then its port is no longer left to it.
    """
    assert plan().commands()["broker"] == ["broker", "--host", "127.0.0.1", "--port", "29400"]


def test_what_is_left_open_is_decided_anew_for_each_run() -> None:
    """
    When two runs are given neither job nor run directory, then they share neither.
    """
    first, second = make_plan(options()).settings, make_plan(options()).settings

    assert first.job != second.job
    assert first.run_dir != second.run_dir
    assert first.run_dir.is_absolute()


def test_the_only_rank_of_a_node_is_where_another_launcher_has_put_it() -> None:
    """
    When another launcher has placed a rank, then its agent is told so, and how the module is named.
    """
    placed = options(
        placed=(1, 4, 2), nnodes=8, broker="127.0.0.1:29400", run_dir=Path("/d"), module=True,
        script="mine.train",
    )  # fmt: skip
    agent = make_plan({**placed, "node_rank": 5}).commands()["agent-5"]

    assert agent[-6:] == ["--placed", "1", "4", "2", "-m", "mine.train"]


def test_a_node_that_was_placed_holds_one_rank() -> None:
    """
    When a node is said to be placed and to have several ranks, then it is refused.
    """
    several = options(placed=(0, 2, 0), nproc_per_node=2, broker="h:1", run_dir=Path("/d"))

    with pytest.raises(UsageError, match="the only rank of a node, and not for --nproc-per-node 2"):
        check_plan(make_plan(several))


def test_a_further_process_for_a_node_that_is_there_is_a_node_beside_it(tmp_path: Path) -> None:
    """
    When a launcher of a node lives, then another one that is told so takes a number beyond those of the job
    and has room for its rank; when the first has gone, the number is its own again.
    """
    placed = options(
        placed=(0, 1, 3), nnodes=4, broker="127.0.0.1:29400", run_dir=tmp_path, node_rank=3,
        spare_if_taken=True,
    )  # fmt: skip
    first = make_plan(placed)
    assert (first.node, first.spare) == (3, 0)
    with run_dir_of(first.settings, first.node, leads=False):
        second = make_plan(placed)
        assert (second.node, second.spare) == (7, 1)
        agent = second.commands()["agent-7"]
        assert agent[agent.index("--spare") + 1] == "1"
        with run_dir_of(second.settings, second.node, leads=False):
            assert make_plan(placed).node == 11
    assert make_plan(placed).node == 3


@pytest.mark.parametrize(("node", "spare"), [(1, 0), (-2, 1), (0, -1)])
def test_a_node_beyond_the_jobs_needs_room_for_others(node: int, spare: int) -> None:
    """
    When a node has no ranks of its own and no room for those of others, then it is refused.
    """
    chosen = options(node_rank=node, spare=spare, broker="127.0.0.1:29400", run_dir=Path("/d"))
    with pytest.raises(UsageError, match=r"needs --spare|--spare must be at least 0"):
        check_plan(make_plan({**chosen, "job": "j"}))


def test_the_agent_alone_is_given_the_socket_of_a_starter() -> None:
    """
    When another program starts the ranks of a node, then its agent inherits the socket to it; of the script
    nothing is asked, and one node needs to be told nothing.
    """
    mine, theirs = socket.socketpair()
    with mine, theirs:
        chosen = options(starter=(theirs.fileno(), "mark"), script="none.py", nproc_per_node=2)
        made = make_plan(chosen)
        check_plan(made)

        assert made.inherited("agent-0") == (theirs.fileno(),)
        assert made.inherited("broker") == ()
    agent = made.commands()["agent-0"]
    assert agent[-4:] == ["--starter", str(made.inherited("agent-0")[0]), "mark", "none.py"]


def test_a_starter_is_a_socket(tmp_path: Path) -> None:
    """
    When what is said to be a starter is a file, then it is refused.
    """
    with (tmp_path / "file").open("w") as file:
        made = make_plan(options(starter=(file.fileno(), "mark")))
        with pytest.raises(UsageError, match="is not a socket of this process"):
            check_plan(made)


def test_a_placed_node_must_be_told_where_the_others_are() -> None:
    """
    When another launcher's nodes have no run directory in common, then the sentence says where to
    name it; the name of the job they find there.
    """
    with pytest.raises(
        UsageError, match="needs --run-dir, the same on every node; name it in TFT_RUN"
    ):
        make_plan(options(placed=(0, 1, 0), nnodes=2, broker="127.0.0.1:29400"))


def test_the_name_of_a_placed_job_is_found_in_its_run_directory(tmp_path: Path) -> None:
    """
    When nodes were told no name, then all of them are given the same one, and it is kept.
    """
    made = [
        make_plan(options(placed=(n, 2, 0), nnodes=2, node_rank=n, broker="h:1", run_dir=tmp_path))
        for n in range(2)
    ]
    first, second = (named(each).settings.job for each in made)

    assert first == second != ""
    assert [path.name for path in tmp_path.iterdir()] == ["job.name"]
    assert (tmp_path / "job.name").stat().st_mode & 0o077 == 0


def test_a_job_resumes_if_there_is_anything_to_resume(tmp_path: Path) -> None:
    """
    When a run may resume or begin, then node 0 looks whether there has been one.
    """
    may = options(resume_if_any=True, run_dir=tmp_path)
    assert not make_plan(may).settings.resume
    (tmp_path / "story.jsonl").touch()

    assert make_plan(may).settings.resume
    assert make_plan(may).may_begin
    assert not make_plan({**may, "resume": True}).may_begin
    assert not make_plan({**may, "node_rank": 1}).settings.resume


def test_a_leader_goes_on_with_the_run_whose_nodes_train(tmp_path: Path) -> None:
    """
    When nodes train and their `tft lead` is started again, then it leads their run, and the next one leads a new run
    when they have ended.
    """
    lead = options(node_rank=LEADER, led_elsewhere=True, resume_if_any=True, run_dir=tmp_path,
                   nnodes=2, broker="127.0.0.1:29400")  # fmt: skip
    first = make_plan(lead)
    assert not first.goes_on
    with run_dir_of(first.settings, node=1, leads=False):
        write_job(first.settings, [])
        (tmp_path / "story.jsonl").touch()
        second = make_plan(lead)
        assert second.goes_on
        assert second.settings.run == first.settings.run
    third = make_plan(lead)
    assert not third.goes_on
    assert third.settings.run != first.settings.run


def test_nodes_must_be_told_what_they_share() -> None:
    """
    When a job has several nodes, then what they must agree on is not made up by each.
    """
    with pytest.raises(UsageError, match="a job of 2 nodes needs --job, --run-dir, the same"):
        make_plan(options(nnodes=2, broker="127.0.0.1:29400"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, not 0"),
        ({"nproc_per_node": -1}, "--nproc-per-node must be at least 1, not -1"),
        ({"max_incidents": -1}, "--max-incidents must be at least 0, not -1"),
        ({"save_copies": "two"}, "--save-copies must be one or all, not two"),
        ({"audit": "on"}, "--audit must be first, strict or off, not on"),
        ({"keep_checkpoints": -1}, "--keep-checkpoints must be at least 0, not -1"),
        ({"max_rank_faults": -1}, "--max-rank-faults must be at least 0, not -1"),
        (
            {"enable": ("dump", "pray")},
            "--enable takes migrate, scale_out, retry, recover, scale_in, dump, and not pray",
        ),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    """
    When a number is too small or a strategy unknown, then the sentence says what is allowed.
    """
    settings = JobSettings(job="j", run_dir=Path("/d"), broker="h:1", **wrong)

    with pytest.raises(UsageError, match=sentence):
        check_settings(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    """
    When only this machine can reach an address, then it is used without more ado.
    """
    check_open(host, "--host", allowed=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "node-1"])
def test_what_others_can_reach_needs_leave(host: str) -> None:
    """
    When others could reach an address, then it is refused unless --insecure is given.
    """
    check_open(host, "--host", allowed=True)
    with pytest.raises(UsageError, match="--insecure"):
        check_open(host, "--host", allowed=False)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_refused(offset: int) -> None:
    """
    When something listens at either of the broker's ports, then the address is taken.
    """
    first = int(free_address("127.0.0.1").rpartition(":")[2])  # and the next one is free, too
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + offset))
        taken.listen()
        with pytest.raises(AddressTaken, match=f":{first + offset}: another process does"):
            check_free("127.0.0.1", first)


def test_an_address_of_another_machine_is_refused() -> None:
    """
    When the broker's host is not this machine's, then that is the sentence.
    """
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:29400: Cannot assign"):
        check_free("192.0.2.1", 29400)


def test_a_found_address_is_free() -> None:
    """
    When the address is left to the launcher, then a broker can listen there.
    """
    host, port = free_address("127.0.0.1").split(":")

    check_free(host, int(port))
