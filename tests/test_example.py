"""
The data, the model and the record of the example. Whole runs of it are in `tests/e2e`.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from corpus import BUDGET, Batches, load_corpus
from demo import Progress
from gpt import GPT, SIZES, make_optimizer, make_scheduler
from record import Record
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel as DDP

# ---------------------------------------------------------------- the data of the example


def test_corpus_is_the_same_at_each_load() -> None:
    """When the corpus is loaded twice, then it has the same bytes, and the requested size."""
    text = load_corpus()

    assert len(text) == BUDGET
    assert text.equal(load_corpus())


def batches(*, seed: int = 0, rank: int = 0) -> Batches:
    """
    Return a small stream of batches.
    """
    return Batches(torch.arange(250, dtype=torch.uint8), batch=2, context=8, seed=seed, rank=rank)


def test_targets_are_the_inputs_shifted_by_one_token() -> None:
    """When a batch is drawn, then each target is the token after its input."""
    inputs, targets = batches().next()

    assert inputs.shape == targets.shape == (2, 8)
    assert targets.equal(inputs + 1)


def test_each_rank_and_seed_has_its_own_batches() -> None:
    """When rank or seed differ, then the batches differ. When both are equal, the batches are the
    same."""
    first = batches().next()[0]

    assert first.equal(batches().next()[0])
    assert not first.equal(batches(rank=1).next()[0])
    assert not first.equal(batches(seed=1).next()[0])


def test_batches_continue_from_a_loaded_position() -> None:
    """When a position is loaded into a second stream of batches, then the second stream draws the
    same batches as the first."""
    here, there = batches(), batches()
    here.next()
    state = here.state_dict()
    there.load_state_dict(state)

    assert state == {"position": 1}
    assert here.next()[0].equal(there.next()[0])
    assert here.state_dict() == there.state_dict()


# ---------------------------------------------------------------- the model of the example


def test_small_model_has_at_least_30_million_parameters() -> None:
    """When the size is `small`, the larger of the two, then the model has at least 30 million
    parameters, so that a repair transfers a realistic number of bytes."""
    with torch.device("meta"):
        model = GPT(SIZES["small"])

    assert sum(parameter.numel() for parameter in model.parameters()) >= 30_000_000


def test_scheduler_state_can_be_packed_without_classes() -> None:
    """When the scheduler's state is read, then it can be packed as JSON, without knowledge of any
    class."""
    optimizer = make_optimizer(GPT(SIZES["tiny"]))
    state = make_scheduler(optimizer, steps=200).state_dict()

    assert json.loads(json.dumps(state)) == state
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """
    Form a process group without peers.
    """
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_tiny_model_fills_two_buckets_of_ddp() -> None:
    """When DDP has rebuilt its buckets after the first step, then the tiny model fills two
    buckets."""
    size = SIZES["tiny"]
    wrapped = DDP(GPT(size))
    data = Batches(load_corpus(), batch=size.batch, context=size.context, seed=0, rank=0)
    for _ in range(3):  # DDP's statistics are one forward behind
        wrapped(*data.next()).backward()

    told = wrapped._get_ddp_logging_data()  # type: ignore[no-untyped-call] # torch's own
    assert len(told["rebuilt_bucket_sizes"].split(",")) == 2


# ---------------------------------------------------------------- the record of a run


def steps_of(directory: Path, rank: int = 0) -> list[tuple[int, str]]:
    """
    Return the rows of a rank without their times.
    """
    lines = (directory / f"steps-rank{rank}.jsonl").read_text().splitlines()
    return [(row["step"], row["loss"]) for row in map(json.loads, lines)]


def test_a_row_has_the_step_the_exact_loss_and_the_time(tmp_path: Path) -> None:
    """When a step is written, then its loss is read back to the last bit, before the file is
    closed."""
    record = Record(tmp_path, 3)
    record.write(1, 0.1)
    record.write(2, 1 / 3)

    rows = [json.loads(row) for row in (tmp_path / "steps-rank3.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [["step", "loss", "time"]] * 2
    assert [float.fromhex(row["loss"]) for row in rows] == [0.1, 1 / 3]
    assert rows[0]["time"] < rows[1]["time"]


def test_rolled_back_rank_drops_the_rows_that_will_be_written_again(tmp_path: Path) -> None:
    """When step 2 is computed again after step 3, then the old rows of both steps are removed."""
    record = Record(tmp_path, 0)
    for step in (1, 2, 3):
        record.write(step, 1.0)
    record.write(2, 2.0)

    assert steps_of(tmp_path) == [(1, (1.0).hex()), (2, (2.0).hex())]


def test_replacement_process_continues_the_record_of_a_killed_process(tmp_path: Path) -> None:
    """When a process dies in the middle of a row, then its replacement keeps the whole rows before
    its own first step."""
    killed = Record(tmp_path, 0)
    for step in (1, 2, 3):
        killed.write(step, 1.0)
    with (tmp_path / "steps-rank0.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "lo')
    replacement = Record(tmp_path, 0)
    replacement.write(3, 2.0)
    replacement.write(4, 2.0)

    two = (2.0).hex()
    assert steps_of(tmp_path) == [(1, (1.0).hex()), (2, (1.0).hex()), (3, two), (4, two)]


def test_final_digests_are_written_to_their_own_file(tmp_path: Path) -> None:
    """When a rank finishes, then its digests are written to a file next to its steps."""
    Record(tmp_path, 1).finish({"parameters": "00ff"})

    assert json.loads((tmp_path / "final-rank1.json").read_text()) == {"parameters": "00ff"}


def test_demo_display_follows_a_record_that_is_rolled_back(tmp_path: Path) -> None:
    """When a rank is rolled back, and its record shrinks and grows again, then the display shows
    the newest step and loss."""
    record = Record(tmp_path, 0)
    progress = Progress(tmp_path, ranks=1)
    for step in (1, 2, 3, 2, 3, 4):
        record.write(step, 1.0 / step)
        progress.update()
        assert (progress.step, progress.loss) == ([step], [1.0 / step])
