"""
What an agent was told, and the environment it gives to its ranks.
"""

from dataclasses import dataclass
from typing import Self

from tft.agent.reaper import VARIABLE
from tft.config import JobSettings, RankSettings, descriptor_variables
from tft.parent_death import parent_death_tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """
    Where a rank is among those of its machine.
    """

    local_rank: int
    """Its number among them: a script chooses its device by it."""
    local_world: int
    """How many they are."""
    machine: int
    """The number of the machine."""

    @classmethod
    def read(cls, words: tuple[int, int, int]) -> Self:
        """
        What the option `--placed` says.
        """
        local_rank, local_world, machine = words
        return cls(local_rank=local_rank, local_world=local_world, machine=machine)

    def words(self) -> list[str]:
        """
        The words of the option `--placed`.
        """
        return ["--placed", str(self.local_rank), str(self.local_world), str(self.machine)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedElsewhere:
    """
    Another program starts the ranks of a node (`tft.starter`).
    """

    descriptor: int
    """The inherited file descriptor of a socket, with that program at the other end."""
    mark: str
    """Of the processes of that program that the reaper is to end with the ranks."""

    @classmethod
    def read(cls, words: tuple[int, str]) -> Self:
        """
        What the option `--starter` says.
        """
        descriptor, mark = words
        return cls(descriptor=descriptor, mark=mark)

    def words(self) -> list[str]:
        """
        The words of the option `--starter`.
        """
        return ["--starter", str(self.descriptor), self.mark]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """
    One agent.
    """

    job: JobSettings
    """The job it takes part in."""
    node: int
    """The number of its node, from 0."""
    script: str
    """The user's script; with `module`, the name of a module."""
    arguments: tuple[str, ...]
    """The arguments of the script."""
    host: str
    """The address other nodes reach this one at."""
    environment: dict[str, str]
    """What the processes it starts inherit."""
    module: bool = False
    """Run as `python -m` runs a module."""
    placed: Placed | None = None
    """Where another launcher has put the only rank of this node; None: the agent counts its ranks."""
    starter: StartedElsewhere | None = None
    """Who starts the processes of the ranks; None: the agent."""
    spare: int = 0
    """For how many more ranks its node has room."""

    @property
    def ranks(self) -> range:
        """
        The ranks of its node; none, where it is there for those of others.
        """
        if self.node >= self.job.nnodes:
            return range(0)
        first = self.node * self.job.nproc_per_node
        return range(first, first + self.job.nproc_per_node)

    @property
    def command(self) -> tuple[str, ...]:
        """
        What `tft.worker.launch` is to run.
        """
        started = ("-m", self.script) if self.module else (self.script,)
        return (*started, *self.arguments)

    def place(self, slot: int) -> Placed:
        """
        Where the rank is that has this one of the places of the node, as its script finds it.
        """
        if self.placed is not None:
            return self.placed
        return Placed(local_rank=slot, local_world=len(self.ranks) + self.spare, machine=self.node)


def child_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    For the processes that live and die with the agent: found by the reaper, tied to the agent.
    """
    return settings.environment | {VARIABLE: marker} | parent_death_tie()


def python_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    What all ranks have in common. Libraries look at it while they are imported, so a process that
    ranks are to be forked from has it too.
    """
    # one thread a rank, unless the user says otherwise: the ranks of a node share its cores. A program
    # that starts them itself has its own way with cores.
    threads = {} if settings.starter else {"OMP_NUM_THREADS": "1"}
    return {
        **threads,
        **child_environment(settings, marker),
        "PYTHONUNBUFFERED": "1",
    }


def rank_environment(
    settings: AgentSettings,
    *,
    marker: str,
    rank: int,
    incarnation: int,
    successor: bool,
    slot: int,
    page: int,
    words: int,
    store: tuple[str, int],
) -> dict[str, str]:
    """
    For one process of a rank: what a script started by torchrun finds, and what `tft.init` needs.

    `slot` is its place on the node, `page` and `words` are the descriptors it inherits, `store` is where
    the rendezvous store is.
    """
    job = settings.job
    host, port = store
    told = RankSettings(
        rank=rank,
        world=job.world,
        job=job.job,
        run_dir=job.run_dir,
        broker=job.broker,
        adaptor=job.adaptor,
        incarnation=incarnation,
        successor=successor,
        page=page,
        host=settings.host,
        checkpoint_every=job.checkpoint_every,
        checkpoint_dir=job.checkpoint_dir,
        checkpoint_name=job.checkpoint_name,
        keep_checkpoints=job.keep_checkpoints,
        save_copies=job.save_copies,
        curve=job.curve,
        audit=job.audit,
    )
    place = settings.place(slot)
    return {
        **python_environment(settings, marker),
        **told.environment(),
        **descriptor_variables(page=page, words=words),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world),
        "NODE_RANK": str(place.machine),
        "GROUP_RANK": str(place.machine),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # so that init_process_group joins the agent's store, where rank 0 would open one itself
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
