"""
An unchanged torchrun script under an agent.
"""

from tests.agent.stage import Stage
from tft.protocol.messages import Exited

SCRIPT = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.tensor([float(os.environ["RANK"]) + 1])
dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), x.item())
dist.destroy_process_group()
"""


async def test_torch_script_without_tft_runs_unchanged(stage: Stage) -> None:
    """When a script does not use tft, then its process group forms and the script ends with 0."""
    await stage.agent(SCRIPT, nproc=2, adaptor="pytorch")
    for rank in range(2):
        await stage.start(rank=rank)
    for rank in range(2):
        exited = await stage.report(Exited, rank=rank)
        log = (stage.run_dir / "logs" / f"rank-{rank}.0.log").read_text()
        assert exited.code == 0, log
        assert log == f"{rank} 2 3.0\n"
