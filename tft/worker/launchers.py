"""
The facts that a launcher other than `tft run` gives to the processes that it starts.

The facts are the rank of the process, its place, and the address at which all processes can meet.
They are read from the environment alone; no connection or file is opened.

    torchrun     gives all facts, and serves a store of its own at MASTER_ADDR:MASTER_PORT
    srun         gives all facts but the address: tft takes the first host of the step, and a port
                 computed from the numbers of the job and the step
    by hand      RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as for torch's `env://`
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from tft.errors import UsageError

_WORD = r"(?:[\w.-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+"
"""A regular expression for one host, or one range of hosts, in a Slurm node list."""
_NO_STEPS = 0xFFFF_FFF0
"""The first of the special Slurm step numbers. This number and higher numbers do not stand for
steps of srun, but for a batch script or an interactive shell."""
_PORTS = 10_000
"""tft chooses one of 10,000 pairs of ports for a Slurm job. The first pair begins at port 10,000,
the last one ends at port 29,999. By default Linux uses only higher ports for outgoing
connections."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """
    The facts that a launcher has given to one of its processes.
    """

    name: str
    """The name of the launcher, for error messages."""
    rank: int
    world: int
    local_rank: int
    local_world: int
    machine: int
    """The index of this machine among the machines of the job, as the launcher counts them."""
    address: str
    """The address of the machine of process 0, as the launcher gives it to all processes."""
    port: int
    serves: bool
    """True if the launcher serves a store at `address` and `port`. False if the port is free."""
    alone: bool
    """True if all processes of the launcher are on this machine."""
    start: str = ""
    """The launcher's name for this job. It stays the same when the launcher restarts the processes.
    Empty if the launcher has given the job no name."""
    attempt: str = "0"
    """The number of times that the launcher has restarted the processes."""


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """
    Return the facts of the launcher that has started this process, or None if no launcher has
    started it.

    Raises `UsageError`, with the name of the variable, if the environment is incomplete or
    contradicts itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        found = _torchrun(_Told(environ, "torchrun"))
    elif _of_srun(environ):
        found = _srun(_Told(environ, "srun"))
    elif "RANK" in environ or "WORLD_SIZE" in environ:
        found = _by_hand(_Told(environ, "the launcher of this process"))
    else:
        return None
    _check(found)
    return found


def hosts(nodes: str) -> list[str]:
    """
    Return the hosts of a Slurm node list, such as `a[01-03,7],b`.

    Raises `ValueError` if `nodes` is not a node list.
    """
    if not re.fullmatch(f"{_WORD}(,{_WORD})*", nodes, re.ASCII):
        raise ValueError(f"{nodes!r} is not a valid Slurm node list")
    found: list[str] = []
    for word in re.findall(_WORD, nodes, re.ASCII):
        parts = [list(_numbers(part)) for part in re.split(r"(\[.*?\])", word)]
        found += ["".join(each) for each in product(*parts)]
    return found


# ---------------------------------------------------------------- the launchers


class _Told:
    """
    Reads the environment variables that a launcher has set.
    """

    def __init__(self, environ: Mapping[str, str], launcher: str) -> None:
        self.environ = environ
        self.launcher = launcher

    def text(self, *names: str) -> str:
        """
        Return the value of the first of these variables that is set and not empty. Raises
        `UsageError` if all of them are unset or empty.
        """
        for name in names:
            if value := self.environ.get(name):
                return value
        raise UsageError(
            f"{self.launcher} has not set {' or '.join(names)}, so tft cannot tell which rank this "
            "process is: start the script with `tft run`, torchrun or srun, or set the variable"
        )

    def number(self, *names: str) -> int:
        """
        Return the value of the first of these variables that is set, as an integer of at least 0.

        Raises `UsageError` if none is set, or if the value is not a number.
        """
        value = self.text(*names)
        if not re.fullmatch(r"\d+", value, re.ASCII):
            name = next(name for name in names if self.environ.get(name))
            raise UsageError(f"{name} must be an integer of at least 0, but is {value!r}")
        return int(value)


def _torchrun(told: _Told) -> Launcher:
    world, local_world = told.number("WORLD_SIZE"), told.number("LOCAL_WORLD_SIZE")
    run_id = told.text("TORCHELASTIC_RUN_ID")
    return Launcher(
        name=told.launcher,
        rank=told.number("RANK"),
        world=world,
        local_rank=told.number("LOCAL_RANK"),
        local_world=local_world,
        machine=told.number("GROUP_RANK"),
        address=told.text("MASTER_ADDR"),
        port=told.number("MASTER_PORT"),
        serves=told.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        alone=local_world == world,
        start="" if run_id == "none" else run_id,  # "none": torchrun got no --rdzv-id
        attempt=told.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _by_hand(told: _Told) -> Launcher:
    rank, world = told.number("RANK"), told.number("WORLD_SIZE")
    address = told.text("MASTER_ADDR")
    here = address == "localhost" or address.startswith("127.")
    # LOCAL_RANK and LOCAL_WORLD_SIZE may be missing. Then MASTER_ADDR decides: if it is an address of
    # this machine, all processes are on this machine. If not, each process has its own machine.
    local_rank, local_world = (rank, world) if here else (0, 1)
    said = {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & told.environ.keys()
    if "LOCAL_RANK" in said or (said and not here):
        local_rank = told.number("LOCAL_RANK")
    if "LOCAL_WORLD_SIZE" in said or (said and not here):
        local_world = told.number("LOCAL_WORLD_SIZE")
    known = {"GROUP_RANK", "NODE_RANK"} & told.environ.keys()
    return Launcher(
        name=told.launcher,
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        machine=told.number("GROUP_RANK", "NODE_RANK") if known else rank // max(1, local_world),
        address=address,
        port=told.number("MASTER_PORT"),
        serves=False,
        alone=here or local_world == world,
    )


def _of_srun(environ: Mapping[str, str]) -> bool:
    """
    Return True if srun itself has started this process.

    It is not enough that the Slurm variables are set: the script of sbatch has these variables too,
    and so do processes that were started by another launcher under srun.
    """
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_PROCID" not in environ or not step or (step.isdigit() and int(step) >= _NO_STEPS):
        return False
    rank, world = environ.get("RANK"), environ.get("WORLD_SIZE")
    return rank is None or world is None or world == _tasks(environ)


def _tasks(environ: Mapping[str, str]) -> str | None:
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")


def _srun(told: _Told) -> Launcher:
    rank = told.number("SLURM_PROCID")
    world = told.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    for theirs, ours, value in (
        ("RANK", "SLURM_PROCID", rank), ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS or SLURM_NTASKS", world),
    ):  # fmt: skip
        if theirs in told.environ and told.number(theirs) != value:
            raise UsageError(
                f"{theirs} is {told.environ[theirs]}, but {ours} is {value}: remove {theirs} from "
                "the environment of srun, or set it separately in each process that srun starts"
            )
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    try:
        machines = hosts(told.text(*lists))
    except ValueError as wrong:
        raise UsageError(f"{' or '.join(lists)} cannot be read: {wrong}") from None
    machine = told.number("SLURM_NODEID")
    job, step = told.number("SLURM_JOB_ID"), told.number("SLURM_STEP_ID")
    return Launcher(
        name=told.launcher,
        rank=rank,
        world=world,
        local_rank=told.number("SLURM_LOCALID"),
        local_world=_tasks_here(told.environ, world, len(machines), machine),
        machine=machine,
        address=told.environ.get("MASTER_ADDR") or machines[0],
        port=(
            told.number("MASTER_PORT")
            if told.environ.get("MASTER_PORT")
            else _PORTS + 2 * ((job * 7 + step) % _PORTS)
        ),
        serves=False,
        alone=len(machines) == 1,
        start=f"{job}.{step}",
    )


def _tasks_here(environ: Mapping[str, str], world: int, machines: int, machine: int) -> int:
    """
    Return the number of processes that srun has started on this machine.
    """
    told = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    counts: list[int] = []
    for word in told.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word, re.ASCII)
        if found is None:
            break
        counts += [int(found[1])] * int(found[2] or 1)
    if len(counts) == machines and machine < machines:
        return counts[machine]
    # if the environment does not say it, assume srun's default: all machines have equally many
    # processes, or the first machines have one more if the processes cannot be divided evenly
    each, more = divmod(world, machines)
    return each + (machine < more)


def _check(found: Launcher) -> None:
    """
    Raise `UsageError` if the facts that a launcher has given contradict each other.
    """
    srun = found.name == "srun"
    for name, value, limit, of in (
        ("SLURM_PROCID" if srun else "RANK", found.rank, found.world, "a job"),
        (
            "SLURM_LOCALID" if srun else "LOCAL_RANK",
            found.local_rank,
            found.local_world,
            "a machine",
        ),
    ):
        if value >= limit:
            raise UsageError(
                f"{name} is {value} in {of} of {limit} processes: it must be below {limit}"
            )
    if found.local_world > found.world:
        raise UsageError(
            f"LOCAL_WORLD_SIZE is {found.local_world}, but WORLD_SIZE is {found.world}: a node "
            "cannot have more processes than the job"
        )
    if not 0 < found.port < 65_535:
        raise UsageError(
            f"MASTER_PORT is {found.port}: it must be between 1 and 65534, because tft uses the "
            "next port too"
        )


def _numbers(part: str) -> Iterator[str]:
    """
    Yield the texts that a part of a node list stands for: the part itself or, if the part is in
    brackets, each number between the brackets.

    The brackets contain numbers and ranges of numbers: `[01-03,7]` gives 01, 02, 03 and 7.
    """
    if not part.startswith("["):
        yield part
        return
    for item in part[1:-1].split(","):
        first, _, last = item.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield str(number).zfill(len(first))  # keep leading zeros: host a01 is not host a1
