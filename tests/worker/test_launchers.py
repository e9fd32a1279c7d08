"""
The environment variables that other launchers set for their processes, and how tft reads them.
"""

import pytest

from tft.errors import UsageError
from tft.worker.launchers import Launcher, hosts, launcher_of

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "41234",
    "TORCHELASTIC_RUN_ID": "nightly",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
HAND = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "29400",
}


def found(environ: dict[str, str]) -> Launcher:
    """
    Return the launcher that tft recognizes from these environment variables.
    """
    launcher = launcher_of(environ)
    assert launcher is not None
    return launcher


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (
            TORCHRUN,
            Launcher(
                name="torchrun", rank=5, world=8, local_rank=1, local_world=4, machine=1,
                address="head", port=41234, serves=True, alone=False, start="nightly", attempt="2",
            ),
        ),
        (
            SRUN,
            Launcher(
                name="srun", rank=5, world=8, local_rank=1, local_world=4, machine=1,
                address="gpu07", port=10_000 + 2 * ((4711 * 7 + 3) % 10_000), serves=False,
                alone=False, start="4711.3",
            ),
        ),
        (
            HAND,
            Launcher(
                name="the launcher of this process", rank=5, world=8, local_rank=1, local_world=4,
                machine=1, address="head", port=29400, serves=False, alone=False,
            ),
        ),
    ],
    ids=["torchrun", "srun", "by hand"],
)  # fmt: skip
def test_launcher_variables_identify_this_process(
    environ: dict[str, str], launcher: Launcher
) -> None:
    """When torchrun, srun or a user's own launcher has started this process, then its rank, place
    and rendezvous address are read from the variables."""
    assert launcher_of(environ) == launcher


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"},
        SRUN | {"SLURM_STEP_ID": ""},
        SRUN | {"SLURM_STEP_ID": "4294967291"},
        SRUN | {"SLURM_STEP_ID": "4294967290"},
    ],
    ids=[
        "nothing",
        "a shell of salloc",
        "a script of sbatch",
        "its batch step",
        "an interactive step",
    ],
)
def test_no_launcher_is_found_for_a_single_process(environ: dict[str, str]) -> None:
    """When there is no launcher, or only the variables of a Slurm allocation, then no launcher is
    found."""
    assert launcher_of(environ) is None


@pytest.mark.parametrize(
    ("environ", "facts"),
    [
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, {"alone": True, "local_world": 8}),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, {"start": ""}),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}, {"serves": False}),
        (TORCHRUN | SRUN | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, {"name": "torchrun"}),
        (SRUN | {"SLURM_STEP_NODELIST": "gpu07"}, {"alone": True, "local_world": 8}),
        (SRUN | {"MASTER_ADDR": "ib-gpu07", "MASTER_PORT": "6000"}, {"address": "ib-gpu07", "port": 6000}),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "6"}, {"world": 6, "local_world": 3}),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "6,2"}, {"local_world": 2}),
        (SRUN | {"SLURM_TASKS_PER_NODE": "4(x2)"}, {"local_world": 4}),
        (SRUN | {"RANK": "5", "WORLD_SIZE": "8"}, {"name": "srun"}),
        (SRUN | HAND | {"WORLD_SIZE": "16", "RANK": "9"}, {"name": "the launcher of this process"}),
        (SRUN | HAND | {"SLURM_STEP_ID": "4294967291"}, {"name": "the launcher of this process"}),
        (
            {key: value for key, value in SRUN.items() if key != "SLURM_STEP_NODELIST"}
            | {"SLURM_JOB_NODELIST": "b,c"},
            {"address": "b"},
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "6000"},
            {"alone": True, "local_rank": 3, "local_world": 4, "machine": 0},
        ),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "head", "MASTER_PORT": "6000"},
            {"alone": False, "local_rank": 0, "local_world": 1, "machine": 3},
        ),
        (HAND | {"NODE_RANK": "7"}, {"machine": 7}),
    ],
)  # fmt: skip
def test_missing_variables_are_derived_from_the_others(
    environ: dict[str, str], facts: dict[str, object]
) -> None:
    """When a launcher sets fewer or more variables, then the missing values are derived from the
    variables that are set."""
    launcher = found(environ)

    assert {name: getattr(launcher, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("whole", "missing"),
    [
        *((TORCHRUN, name) for name in list(TORCHRUN)[:7]),
        *((SRUN, name) for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID")),
        (SRUN, "SLURM_STEP_NODELIST"),
        *((HAND, name) for name in HAND),
    ],
)  # fmt: skip
def test_missing_variable_is_named(whole: dict[str, str], missing: str) -> None:
    """When a launcher does not set a variable that cannot be derived, then the error names this
    variable."""
    environ = {name: value for name, value in whole.items() if name != missing}

    with pytest.raises(UsageError, match=missing):
        launcher_of(environ)


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        (TORCHRUN | {"RANK": "8"}, "RANK is 8 in a job of 8 processes"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "LOCAL_RANK is 4 in a machine of 4 processes"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE is 9, but WORLD_SIZE is 8"),
        (HAND | {"RANK": "-1"}, "RANK must be an integer of at least 0, but is '-1'"),
        (HAND | {"MASTER_PORT": "65535"}, "MASTER_PORT is 65535: it must be between"),
        (HAND | {"MASTER_PORT": "http"}, "MASTER_PORT must be an integer"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID is 8 in a job of 8 processes"),
        (SRUN | {"RANK": "0"}, "RANK is 0, but SLURM_PROCID is 5"),
        (SRUN | {"WORLD_SIZE": "4"}, "WORLD_SIZE is 4, but SLURM_STEP_NUM_TASKS or SLURM_NTASKS is 8"),
        (SRUN | {"SLURM_STEP_NODELIST": "a["}, "SLURM_STEP_NODELIST or SLURM_JOB_NODELIST cannot be read"),
    ],
)  # fmt: skip
def test_contradictory_or_malformed_variables_are_refused(
    environ: dict[str, str], sentence: str
) -> None:
    """When variables contradict each other or are not numbers, then the error names the variable."""
    with pytest.raises(UsageError, match=sentence):
        launcher_of(environ)


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("a", ["a"]),
        ("a[01-03,7],b", ["a01", "a02", "a03", "a7", "b"]),
        ("rack[1-2]n[08-10]", ["rack1n08", "rack1n09", "rack1n10", "rack2n08", "rack2n09", "rack2n10"]),
        ("gpu[099-101]-ib.x", ["gpu099-ib.x", "gpu100-ib.x", "gpu101-ib.x"]),
        ("a,b-1,c", ["a", "b-1", "c"]),
    ],
)  # fmt: skip
def test_short_node_list_of_slurm_is_expanded(nodes: str, expected: list[str]) -> None:
    """When Slurm gives a node list in its short form, then it is expanded to all hosts in the same
    order."""
    assert hosts(nodes) == expected


@pytest.mark.parametrize(
    "nodes", ["", ",", "a,,b", "a[", "a]", "a[]", "a[1-]", "a[x]", "a b", "a[1],"]
)
def test_malformed_node_list_is_refused(nodes: str) -> None:
    """When a node list is malformed, then the whole list is refused, also if its beginning is
    readable."""
    with pytest.raises(ValueError, match="is not a valid Slurm node list"):
        hosts(nodes)
