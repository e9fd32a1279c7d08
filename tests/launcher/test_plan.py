"""
The decisions and refusals of `tft run` before it starts a process.
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


def plan(node: int = 0, **job: Any) -> Plan:  # Any: the settings have different types
    """
    Return the plan of a job of two nodes.
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


def options(**chosen: Any) -> dict[str, Any]:  # Any: the options have different types
    """
    Return the options of `tft run` as click passes them, with only these given.
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
        "export": None,
        "export_only": False,
        "warm_ranks": 0,
        "backup_every": 0,
        "on_corruption": "majority",
        "checkpoint_every": 0,
        "checkpoint_dir": None,
        "checkpoint_name": "step-{step:08d}",
        "keep_checkpoints": 0,
        "save_copies": "one",
        "curve": None,
        "audit": "first",
        "last_step": 0,
        "record_digests": False,
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


def test_interval_of_lines_below_zero_is_refused(tmp_path: Path) -> None:
    """When --progress is negative, then the run is refused."""
    (tmp_path / "train.py").write_text("")
    made = make_plan(
        options(progress=-1, run_dir=tmp_path / "run", script=str(tmp_path / "train.py"))
    )
    with pytest.raises(UsageError, match="--progress must be at least 0, not -1"):
        check_plan(made)


def test_only_node_0_starts_the_broker_and_the_controller() -> None:
    """When the job has two nodes, then node 0 starts the broker, the controller and an agent. Node
    1 starts only an agent."""
    assert list(plan(0).commands()) == ["broker", "controller", "agent-0"]
    assert list(plan(1).commands()) == ["agent-1"]


def test_agent_command_ends_with_the_script_and_its_arguments() -> None:
    """When an agent is started, then the script and all its arguments are last in the agent's
    command."""
    assert plan(1).commands()["agent-1"][-3:] == ["train.py", "--steps", "60"]


def test_restarted_broker_gets_the_same_address() -> None:
    """When the address of the broker is known, then the command of the broker names the same host
    and port."""
    assert plan().commands()["broker"] == ["broker", "--host", "127.0.0.1", "--port", "29400"]


def test_each_run_without_settings_gets_its_own_job_and_directory() -> None:
    """When two runs are given neither a job name nor a run directory, then each run gets its own."""
    first, second = make_plan(options()).settings, make_plan(options()).settings

    assert first.job != second.job
    assert first.run_dir != second.run_dir
    assert first.run_dir.is_absolute()


def test_agent_of_a_placed_node_gets_the_placement_and_the_module() -> None:
    """When another launcher has placed a rank, then the agent's command has the placement and the
    name of the module."""
    placed = options(
        placed=(1, 4, 2), nnodes=8, broker="127.0.0.1:29400", run_dir=Path("/d"), module=True,
        script="mine.train",
    )  # fmt: skip
    agent = make_plan({**placed, "node_rank": 5}).commands()["agent-5"]

    assert agent[-6:] == ["--placed", "1", "4", "2", "-m", "mine.train"]


def test_placed_node_with_several_ranks_is_refused() -> None:
    """When a node is placed by another launcher and has `--nproc-per-node 2`, then the plan is
    refused."""
    several = options(placed=(0, 2, 0), nproc_per_node=2, broker="h:1", run_dir=Path("/d"))

    with pytest.raises(UsageError, match="a node with one rank, not for --nproc-per-node 2"):
        check_plan(make_plan(several))


def test_second_launcher_of_a_placed_node_becomes_a_spare_node(tmp_path: Path) -> None:
    """When the launcher of a node runs, then a second launcher with `spare_if_taken` gets a node
    number beyond the job and room for one spare. When the first has ended, the original number is
    given again."""
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
def test_node_beyond_the_job_without_spares_is_refused(node: int, spare: int) -> None:
    """When a node has no ranks of its own and no room for spares, then the plan is refused."""
    chosen = options(node_rank=node, spare=spare, broker="127.0.0.1:29400", run_dir=Path("/d"))
    with pytest.raises(UsageError, match=r"needs --spare|--spare must be at least 0"):
        check_plan(make_plan({**chosen, "job": "j"}))


def test_only_the_agent_inherits_the_socket_of_a_starter() -> None:
    """When another program starts the ranks of a node, then only the agent inherits the socket to
    that program. The script need not exist, and a job of one node needs no further settings."""
    mine, theirs = socket.socketpair()
    with mine, theirs:
        chosen = options(starter=(theirs.fileno(), "mark"), script="none.py", nproc_per_node=2)
        made = make_plan(chosen)
        check_plan(made)

        assert made.inherited("agent-0") == (theirs.fileno(),)
        assert made.inherited("broker") == ()
    agent = made.commands()["agent-0"]
    assert agent[-4:] == ["--starter", str(made.inherited("agent-0")[0]), "mark", "none.py"]


def test_warm_ranks_are_refused_if_another_program_starts_the_ranks() -> None:
    """When another program starts the ranks, then warm processes are refused."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = make_plan(options(starter=(theirs.fileno(), "mark"), warm_ranks=1))
        with pytest.raises(UsageError, match="--warm-ranks is only for jobs whose agents start"):
            check_plan(made)


def test_starter_that_is_a_file_is_refused(tmp_path: Path) -> None:
    """When the file descriptor of a starter is a file and not a socket, then the plan is refused."""
    with (tmp_path / "file").open("w") as file:
        made = make_plan(options(starter=(file.fileno(), "mark")))
        with pytest.raises(UsageError, match="is not a socket of this process"):
            check_plan(made)


def test_placed_node_without_a_run_directory_is_refused() -> None:
    """When placed nodes are given no common run directory, then the plan is refused and the
    sentence names `TFT_RUN`. The name of the job is not required."""
    with pytest.raises(
        UsageError,
        match=r"needs --run-dir, the same on every node; set this in .* TFT_RUN",
    ):
        make_plan(options(placed=(0, 1, 0), nnodes=2, broker="127.0.0.1:29400"))


def test_placed_nodes_get_the_job_name_from_the_run_directory(tmp_path: Path) -> None:
    """When placed nodes are given no job name, then all of them get the same name. The name is kept
    in a private file in the run directory."""
    made = [
        make_plan(options(placed=(n, 2, 0), nnodes=2, node_rank=n, broker="h:1", run_dir=tmp_path))
        for n in range(2)
    ]
    first, second = (named(each).settings.job for each in made)

    assert first == second != ""
    assert [path.name for path in tmp_path.iterdir()] == ["job.name"]
    assert (tmp_path / "job.name").stat().st_mode & 0o077 == 0


def test_run_resumes_when_the_run_directory_has_a_story(tmp_path: Path) -> None:
    """When a run may resume or begin, then node 0 resumes if the run directory has a story."""
    may = options(resume_if_any=True, run_dir=tmp_path)
    assert not make_plan(may).settings.resume
    (tmp_path / "story.jsonl").touch()

    assert make_plan(may).settings.resume
    assert make_plan(may).may_begin
    assert not make_plan({**may, "resume": True}).may_begin
    assert not make_plan({**may, "node_rank": 1}).settings.resume


def test_restarted_leader_continues_the_run_while_its_nodes_live(tmp_path: Path) -> None:
    """When `tft lead` is started again and a node of the run lives, then it continues that run.
    When the nodes have ended, the next `tft lead` begins a new run."""
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


def test_several_nodes_without_a_common_run_directory_are_refused() -> None:
    """When a job of several nodes is given no `--job` and no `--run-dir`, then the plan is refused
    and names both options."""
    with pytest.raises(UsageError, match="a job of 2 nodes needs --job, --run-dir, the same"):
        make_plan(options(nnodes=2, broker="127.0.0.1:29400"))


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"nnodes": 0}, "--nnodes must be at least 1, not 0"),
        ({"nproc_per_node": -1}, "--nproc-per-node must be at least 1, not -1"),
        ({"max_incidents": -1}, "--max-incidents must be at least 0, not -1"),
        ({"save_copies": "two"}, "--save-copies must have the value one or all, not two"),
        (
            {"on_corruption": "ask"},
            "--on-corruption must be one of majority, end, continue, not ask",
        ),
        ({"audit": "on"}, "--audit must have the value first, strict or off, not on"),
        ({"warm_ranks": -1}, "--warm-ranks must be at least 0, not -1"),
        ({"backup_every": -1}, "--backup-every must be at least 0, not -1"),
        ({"keep_checkpoints": -1}, "--keep-checkpoints must be at least 0, not -1"),
        ({"last_step": -1}, "--last-step must be at least 0, not -1"),
        ({"max_rank_faults": -1}, "--max-rank-faults must be at least 0, not -1"),
        (
            {"enable": ("dump", "pray")},
            "--enable does not know pray; the strategies are migrate, scale_out, retry, recover, "
            "scale_in, dump",
        ),
    ],
)
def test_a_setting_out_of_its_bounds_is_refused(wrong: dict[str, Any], sentence: str) -> None:
    """When a number is too small or a strategy is unknown, then the settings are refused and the
    sentence names the allowed values."""
    settings = JobSettings(job="j", run_dir=Path("/d"), broker="h:1", **wrong)

    with pytest.raises(UsageError, match=sentence):
        check_settings(settings)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "localhost"])
def test_loopback_address_is_allowed_without_insecure(host: str) -> None:
    """When only this machine can reach an address, then the address is allowed without
    `--insecure`."""
    check_open(host, "--host", allowed=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "node-1"])
def test_address_reachable_from_other_machines_needs_insecure(host: str) -> None:
    """When other machines can reach an address, then the address is refused unless `--insecure` is
    given."""
    check_open(host, "--host", allowed=True)
    with pytest.raises(UsageError, match="--insecure"):
        check_open(host, "--host", allowed=False)


@pytest.mark.parametrize("offset", [0, 1])
def test_a_port_in_use_is_refused(offset: int) -> None:
    """When another process listens at one of the broker's two ports, then the address is refused
    and the sentence names the port."""
    # `free_address` ensures that the next port is free too
    first = int(free_address("127.0.0.1").rpartition(":")[2])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + offset))
        taken.listen()
        with pytest.raises(AddressTaken, match=f":{first + offset}: another process listens there"):
            check_free("127.0.0.1", first)


def test_an_address_of_another_machine_is_refused() -> None:
    """When the broker's host is not an address of this machine, then it is refused and the sentence
    gives the reason."""
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:29400: Cannot assign"):
        check_free("192.0.2.1", 29400)


def test_address_chosen_by_the_launcher_is_free() -> None:
    """When the launcher chooses the address, then the ports of the address are free for the broker."""
    host, port = free_address("127.0.0.1").split(":")

    check_free(host, int(port))
