"""
The settings of an agent, and the environment that the agent gives to its ranks.
"""

from dataclasses import dataclass
from typing import Self

from tft.agent.reaper import VARIABLE
from tft.config import JobSettings, RankSettings, descriptor_variables
from tft.parent_death import parent_death_tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """
    The place of one rank on its machine.
    """

    local_rank: int
    """The number of the rank on its machine, from 0. A training script uses this number to choose
    its device, such as a GPU."""
    local_world: int
    """The number of ranks on the machine."""
    machine: int
    """The number of the machine."""

    @classmethod
    def read(cls, words: tuple[int, int, int]) -> Self:
        """
        Return the place that the three values of the command-line option `--placed` describe.
        """
        local_rank, local_world, machine = words
        return cls(local_rank=local_rank, local_world=local_world, machine=machine)

    def words(self) -> list[str]:
        """
        Return the command-line words of the option `--placed` for this place.
        """
        return ["--placed", str(self.local_rank), str(self.local_world), str(self.machine)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedElsewhere:
    """
    The settings for a node whose ranks another program starts (`tft.spi.launcher`).
    """

    descriptor: int
    """The inherited file descriptor of a socket. The program that starts the ranks has the other
    end."""
    mark: str
    """The value of the environment variable TFT_REAPER in the processes that the other program
    starts. When the agent has ended, the reaper kills all processes that have this value."""

    @classmethod
    def read(cls, words: tuple[int, str]) -> Self:
        """
        Return the settings that the two values of the command-line option `--starter` describe.
        """
        descriptor, mark = words
        return cls(descriptor=descriptor, mark=mark)

    def words(self) -> list[str]:
        """
        Return the command-line words of the option `--starter` for these settings.
        """
        return ["--starter", str(self.descriptor), self.mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """
    The settings of one agent.
    """

    job: JobSettings
    """The job that the agent takes part in."""
    node: int
    """The number of the agent's node, from 0."""
    script: str
    """The path of the user's script or, if `module` is True, the name of a module."""
    arguments: tuple[str, ...]
    """The arguments of the script."""
    host: str
    """The address at which other nodes can reach this node."""
    environment: dict[str, str]
    """The environment that the processes started by the agent inherit."""
    module: bool = False
    """True if `script` is a module, to be run as with `python -m`."""
    placed: Placed | None = None
    """The local rank, local world size and machine number that another launcher (such as torchrun)
    has given to the only rank of this node. None if the agent numbers its ranks itself."""
    starter: StartedElsewhere | None = None
    """The other program that starts the processes of the ranks, or None if the agent starts
    them."""
    spare: int = 0
    """The number of ranks of other nodes that this node can take over."""
    pulse: int | None = None
    """The pipe to which the agent writes its signs of life (`tft.pulse`), or None."""

    @property
    def ranks(self) -> range:
        """
        The ranks of the node. The range is empty when the node is only a spare for ranks of other
        nodes.
        """
        if self.node >= self.job.nnodes:
            return range(0)
        first = self.node * self.job.nproc_per_node
        return range(first, first + self.job.nproc_per_node)

    @property
    def command(self) -> tuple[str, ...]:
        """
        The arguments for the program `tft.worker.launch`, which runs the user's script in a rank:
        the script or module, and its arguments.
        """
        started = ("-m", self.script) if self.module else (self.script,)
        return (*started, *self.arguments)

    def place(self, slot: int) -> Placed:
        """
        Return the local rank, local world size and machine number that the script of a rank sees.
        `slot` is the number of the rank's place on this node, from 0.
        """
        if self.placed is not None:
            return self.placed
        return Placed(local_rank=slot, local_world=len(self.ranks) + self.spare, machine=self.node)


def child_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    Return the environment for processes that must end with the agent. It contains `marker`, by
    which the reaper finds the processes. It also contains variables that make the kernel kill the
    process when the agent dies (`tft.parent_death`).
    """
    return settings.environment | {VARIABLE: marker} | parent_death_tie()


def python_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    Return the environment variables that are the same for all ranks. The fork server gets them too,
    because some libraries read them only while they are imported.
    """
    # one OpenMP thread per rank by default, because the ranks of a node share its cores. Another
    # program that starts the ranks must choose the number of threads itself.
    threads = {} if settings.starter else {"OMP_NUM_THREADS": "1"}
    return {
        **threads,
        **child_environment(settings, marker),
        "PYTHONUNBUFFERED": "1",
    }


_OF_A_RANK = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables (as torchrun sets them) whose values a warm process knows only when it has
a rank."""
NO_RANK = "no-rank-yet"
"""The value of the variables in `_OF_A_RANK` until a warm process has a rank. It is no number, so a
script that reads a variable too early fails."""


def warm_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    Return the environment for a warm process, which has no rank yet. Of the variables that torchrun
    gives to a script, it has those that are the same for all ranks of the node. The other variables
    have a value that is no number, so that a script that reads one of them too early fails, and
    does not train with a wrong rank.
    """
    place = settings.place(0)
    return {
        **python_environment(settings, marker),
        **dict.fromkeys(_OF_A_RANK, NO_RANK),
        "TFT_JOB": settings.job.job,
        "WORLD_SIZE": str(settings.job.world),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "NODE_RANK": str(place.machine),
        "GROUP_RANK": str(place.machine),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """
    The settings of one process of a rank that differ from process to process.
    """

    rank: int
    incarnation: int
    successor: bool
    slot: int
    """The number of the rank's place on the node, from 0."""
    page: int
    """The inherited file descriptor of the page (the shared memory of the rank)."""
    words: int
    """The inherited file descriptor of a memory file. Before its end, the process writes the stacks
    of its threads into this file."""
    store: tuple[str, int]
    """The address (host, port) of the rendezvous store."""
    bell: int | None = None
    """The inherited file descriptor of the pipe through which the process wakes the agent. None in
    a job with one node."""


def rank_environment(settings: AgentSettings, marker: str, start: RankStart) -> dict[str, str]:
    """
    Return the environment for one process of a rank. It has the variables that torchrun gives to a
    script, and the variables that `tft.init` needs. `marker` is the reaper's mark.
    """
    job = settings.job
    host, port = start.store
    told = RankSettings(
        rank=start.rank,
        world=job.world,
        job=job.job,
        run_dir=job.run_dir,
        broker=job.broker,
        adaptor=job.adaptor,
        incarnation=start.incarnation,
        successor=start.successor,
        page=start.page,
        host=settings.host,
        bell=start.bell,
        backup_every=job.backup_every,
        checkpoint_every=job.checkpoint_every,
        checkpoint_dir=job.checkpoint_dir,
        checkpoint_name=job.checkpoint_name,
        keep_checkpoints=job.keep_checkpoints,
        save_copies=job.save_copies,
        curve=job.curve,
        skip_batch=job.skip_batch,
        export=job.export,
        export_only=job.export_only,
        audit=job.audit,
        last_step=job.last_step,
        record_digests=job.record_digests,
    )
    place = settings.place(start.slot)
    return {
        **python_environment(settings, marker),
        **told.environment(),
        **descriptor_variables(
            page=start.page, words=start.words, bell="" if start.bell is None else start.bell
        ),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "NODE_RANK": str(place.machine),
        "GROUP_RANK": str(place.machine),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # With this variable, `init_process_group` connects to the rendezvous store that the agent
        # has opened. Without the variable, rank 0 would open another store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
