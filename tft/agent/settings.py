"""
What an agent was told, and the environment it gives to its ranks.
"""

from dataclasses import dataclass

from tft.agent.guard import VARIABLE
from tft.config import JobSettings, RankSettings, descriptor_variables
from tft.lifeline import lifeline


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
    """The user's script."""
    arguments: tuple[str, ...]
    """The arguments of the script."""
    host: str
    """The address other nodes reach this one at."""
    environment: dict[str, str]
    """What the processes it starts inherit."""

    @property
    def ranks(self) -> range:
        """
        The ranks of its node.
        """
        first = self.node * self.job.nproc_per_node
        return range(first, first + self.job.nproc_per_node)


def child_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    For the processes that live and die with the agent: found by the guard, tied to the agent.
    """
    return settings.environment | {VARIABLE: marker} | lifeline()


def python_environment(settings: AgentSettings, marker: str) -> dict[str, str]:
    """
    What all ranks have in common. Libraries look at it while they are imported, so a process that
    ranks are to be forked from has it too.
    """
    return {
        # one thread a rank, unless the user says otherwise: the ranks of a node share its cores
        "OMP_NUM_THREADS": "1",
        **child_environment(settings, marker),
        "PYTHONUNBUFFERED": "1",
    }


def rank_environment(
    settings: AgentSettings,
    *,
    marker: str,
    rank: int,
    incarnation: int,
    page: int,
    words: int,
    store: tuple[str, int],
) -> dict[str, str]:
    """
    For one process of a rank: what a script started by torchrun finds, and what `tft.init` needs.

    `page` and `words` are the descriptors it inherits, `store` is where the rendezvous store is.
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
        page=page,
        host=settings.host,
        checkpoint_every=job.checkpoint_every,
    )
    node = str(settings.node)
    return {
        **python_environment(settings, marker),
        **told.environment(),
        **descriptor_variables(page=page, words=words),
        "LOCAL_RANK": str(rank - settings.ranks.start),
        "LOCAL_WORLD_SIZE": str(job.nproc_per_node),
        "NODE_RANK": node,
        "GROUP_RANK": node,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # so that init_process_group joins the agent's store, where rank 0 would open one itself
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": job.job,
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
