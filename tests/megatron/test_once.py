"""
Tests of the effect of an incident on a script's own objects, in one or two ranks without `tft run`.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import pytest
from torch._C._distributed_c10d import TCPStore  # torch.distributed imports it from here

from tests.megatron.once import Found, run

PATIENCE = 60.0
"""The time limit of a rank, in seconds."""

Once = Callable[..., list[Found]]


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """
    Return a fork server that has imported the cases, so that each new process starts fast.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.once"])
    return context


@pytest.fixture
def once(context: ForkServerContext) -> Once:
    """
    Return a function that runs a case of `once.py` on `world` ranks and returns each rank's result.
    """

    def once(case: str, *arguments: str, world: int = 1) -> list[Found]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        here, there = zip(*(context.Pipe() for _ in range(world)), strict=True)
        ranks = [
            context.Process(
                target=run, args=(there[rank], case, arguments, rank, world, store.port)
            )
            for rank in range(world)
        ]
        for each, end in zip(ranks, there, strict=True):
            each.start()
            end.close()  # then only the rank holds it, and `poll` notices the end of the rank
        try:
            assert all(each.poll(PATIENCE) for each in here), "a rank has found nothing"
            return [each.recv() for each in here]
        finally:
            for each in ranks:
                each.kill()
                each.join()

    return once


def test_an_interrupted_evaluation_leaves_no_mode_switched(once: Once) -> None:
    """When a fault interrupts an evaluation that has switched off the overlapped gathering of
    parameters and the overlapped reduction of gradients, then all modes are as they were when the
    first groups were formed, as in a replacement."""
    (found,) = once("evaluation", "--instances", "1", "--overlap")
    assert found["between"]["hooks"] == 0
    assert not any(found["between"]["training"])
    assert found["after"] == found["before"]
    assert found["after"]["hooks"] == found["after"]["modules"]
    assert found["after"]["gathers"]
    assert found["after"]["reduces"]


@pytest.mark.parametrize(
    "more",
    [("--mtp",), pytest.param(("--tied",), marks=pytest.mark.soak)],
)
def test_a_last_stage_with_embeddings_begins_with_those_of_the_first(
    more: tuple[str, ...], once: Once
) -> None:
    """When the last stage of a pipeline also has the embeddings, for multi-token prediction or for
    its output, then they are equal to those of the first stage when groups have been formed."""
    first, last = once("beginning", "--pp", "2", "--instances", "1", *more, world=2)
    assert any(any(row) for row in first["embeddings"])
    assert last["embeddings"] == first["embeddings"]


def test_replicas_with_different_seeds_begin_with_equal_parameters(once: Once) -> None:
    """When data-parallel ranks build with different seeds, then all have the parameters of the
    first rank, and the same master parameters, when groups have been formed."""
    first, second = once("beginning", "--instances", "0", world=2)
    assert second["state"] == first["state"]


def test_the_collected_log_values_of_an_interrupted_step_are_dropped(once: Once) -> None:
    """When a step with multi-token prediction is interrupted, then Megatron keeps neither the
    collected loss nor the group for its average."""
    (found,) = once("logged", "--instances", "1")
    assert "avg_group" in found["before"]
    assert found["after"] == []


def test_a_group_that_the_script_keeps_itself_is_refused(once: Once) -> None:
    """When a script keeps a group in an object or a dict where it cannot be replaced, then this is
    refused. When the script drops the reference, then `enable` accepts the script."""
    (found,) = once("kept", "--instances", "1")
    in_an_object, in_a_dict, nowhere = found["refused"]
    assert "an object of argparse.Namespace keeps a process group of Megatron" in in_an_object
    assert "a variable or a dict of the script's own keeps a process group of Megatron" in in_a_dict
    assert (nowhere, found["size"]) == ("", 1)


def test_a_group_that_is_kept_later_is_refused_when_real_ones_are_formed(once: Once) -> None:
    """When a script takes a reference to a group after `enable`, then this is refused before the
    first step, as long as the reference exists."""
    (found,) = once("late", "--instances", "1")
    *refused, at_last = found["refused"]
    assert all(
        "an object of argparse.Namespace keeps a process group of Megatron" in each
        for each in refused
    )
    assert (len(refused), at_last) == (2, "")


@pytest.mark.parametrize(
    ("case", "more"),
    [("tried", ("--experts",)), pytest.param("recomputed", (), marks=pytest.mark.soak)],
)
def test_a_model_that_was_called_before_training_is_accepted(
    case: str, more: tuple[str, ...], once: Once
) -> None:
    """When a script calls its model before it trains, then references that Megatron keeps from that
    call do not count as the script's own. A step that is interrupted leaves none of them either."""
    (found,) = once(case, *more, "--instances", "1")
    assert found["refused"] == ""


@pytest.mark.parametrize("case", ["reading", "told_to_read"])
def test_masters_from_a_checkpoint_that_the_script_reads_are_kept(case: str, once: Once) -> None:
    """When a script reads a checkpoint of its own, then the master parameters are those of the
    checkpoint, and are not made from the 16-bit parameters."""
    (found,) = once(case, "--instances", "1")
    assert found["kept"]


def test_router_counts_of_a_step_that_others_have_completed_are_reset(once: Once) -> None:
    """When a rank continues from the middle of a step, with counts of its routers, then the counts
    begin at zero."""
    (found,) = once("counted", "--experts", "--balancing", "global_aux_loss", "--instances", "1")
    assert found["counts"]
    assert not any(found["counts"])


def test_an_interrupted_step_leaves_no_extra_state(once: Once) -> None:
    """When a step is interrupted in which a module has changed its extra state, then checkpoints
    and the rollback have the state before. Megatron's own layers, which have none, are left out."""
    (found,) = once("extra", "--instances", "1")
    assert found["kept"] == ["0.module.counter"]
    assert (found["saved"], found["after"]) == ([{"count": 4}], 4)
    before, between, after = found["digests"]
    assert before == after != between


def test_pipeline_stages_with_different_settings_are_refused(once: Once) -> None:
    """When one stage of a pipeline has another learning rate than the others, which Megatron would
    make equal, then all ranks raise an error when the first groups are formed."""
    first, last = once("stages", "--pp", "2", "--instances", "1", world=2)
    assert "stage 1 of the pipeline has the parameter groups" in first["refused"]
    assert "stage 0 of the pipeline has the parameter groups" in last["refused"]


def test_objects_that_cannot_be_recovered_are_refused_by_enable(once: Once) -> None:
    """When a module has a setting that cannot be recovered, the scheduler is missing, or the data
    reports no position, then `enable` raises an error."""
    (found,) = once("handed", "--instances", "1")
    setting, scheduler, position = found["refused"]
    assert setting.startswith("cuda_graph_impl is local, which the adaptor megatron cannot handle")
    assert scheduler.startswith("this optimizer has a scheduler (OptimizerParamScheduler)")
    assert (
        position
        == "the object data must have the methods state_dict() and load_state_dict(), which a "
        "Namespace does not have"
    )


def test_a_timer_of_an_interrupted_step_can_be_started_again(once: Once) -> None:
    """When a step is interrupted while Megatron's timer runs, then the next step can start the
    timer."""
    (found,) = once("timed", "--instances", "1")
    assert found["runs"]
