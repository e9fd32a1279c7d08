"""
What becomes of a script's own objects in an incident: seen in one rank, or two, without `tft run`.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext

import pytest
from torch._C._distributed_c10d import TCPStore  # as torch.distributed has it

from tests.megatron.once import Found, run

PATIENCE = 60.0
"""Seconds a rank may take."""

Once = Callable[..., list[Found]]


@pytest.fixture(scope="module")
def context() -> ForkServerContext:
    """
    Where processes come from: the imports are paid for once.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.megatron.once"])
    return context


@pytest.fixture
def once(context: ForkServerContext) -> Once:
    """
    What a case finds on each rank.
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
            end.close()  # so that a rank that fails is heard to
        try:
            assert all(each.poll(PATIENCE) for each in here), "a rank has found nothing"
            return [each.recv() for each in here]
        finally:
            for each in ranks:
                each.kill()
                each.join()

    return once


def test_an_evaluation_that_is_broken_off_leaves_nothing_switched(once: Once) -> None:
    """
    When a fault strikes while the model is evaluated, with overlapped gathering of parameters off, then all of
    it is as it was handed over: as it is in a rank that takes the place of another.
    """
    (found,) = once("evaluation", "--instances", "1", "--overlap")
    assert found["between"]["hooks"] == 0
    assert not any(found["between"]["training"])
    assert found["after"] == found["before"]
    assert found["after"]["hooks"] == found["after"]["modules"]
    assert found["after"]["gathers"]


@pytest.mark.parametrize(
    "more",
    [("--mtp",), pytest.param(("--tied",), marks=pytest.mark.soak)],
)
def test_stages_with_a_copy_of_the_embeddings_begin_with_it(
    more: tuple[str, ...], once: Once
) -> None:
    """
    When the last stage of a pipeline has the embeddings, too, because it predicts several tokens, or for output,
    then it has those of the first stage once groups are formed.
    """
    first, last = once("beginning", "--pp", "2", "--instances", "1", *more, world=2)
    assert any(any(row) for row in first["embeddings"])
    assert last["embeddings"] == first["embeddings"]


def test_replicas_that_have_drawn_other_parameters_begin_with_the_same(once: Once) -> None:
    """
    When data-parallel ranks build with other seeds, then all have the parameters of the first one, and the same
    masters, once groups are formed.
    """
    first, second = once("beginning", "--instances", "0", world=2)
    assert second["state"] == first["state"]


def test_what_was_collected_for_the_log_of_a_broken_step_is_dropped(once: Once) -> None:
    """
    When a step is broken off that has predicted several tokens, then neither the loss it has counted nor the group it
    would average it over is left.
    """
    (found,) = once("logged", "--instances", "1")
    assert "avg_group" in found["before"]
    assert found["after"] == []


def test_a_group_that_the_script_keeps_itself_is_refused(once: Once) -> None:
    """
    When a script has kept a group where nothing else can be put in its place, in an object or a dict, then it is told;
    when it has let go of it, then all is as it should be.
    """
    (found,) = once("kept", "--instances", "1")
    in_an_object, in_a_dict, nowhere = found["refused"]
    assert "kept in an object of argparse.Namespace, where tft cannot" in in_an_object
    assert "kept in a variable or a dict of the script's own, where tft cannot" in in_a_dict
    assert (nowhere, found["size"]) == ("", 1)


def test_a_group_that_is_kept_later_is_refused_when_real_ones_are_formed(once: Once) -> None:
    """
    When a script takes a group for itself once it has handed all over, then it is told before the first step, as long as
    it has it.
    """
    (found,) = once("late", "--instances", "1")
    *refused, at_last = found["refused"]
    assert all(
        "kept in an object of argparse.Namespace, where tft cannot" in each for each in refused
    )
    assert (len(refused), at_last) == (2, "")


def test_a_model_that_was_tried_first_is_trained(once: Once) -> None:
    """
    When a script tries its model before it trains, then what Megatron keeps of that is not taken for the script's own.
    """
    (found,) = once("tried", "--experts", "--instances", "1")
    assert found["refused"] == ""


@pytest.mark.parametrize("case", ["reading", "told_to_read"])
def test_what_a_script_has_read_itself_stays_as_it_is(case: str, once: Once) -> None:
    """
    When a script reads a checkpoint of its own, then the masters are the ones it has read, and not what the parameters
    come to.
    """
    (found,) = once(case, "--instances", "1")
    assert found["kept"]


def test_counts_of_a_step_that_others_have_ended_are_forgotten(once: Once) -> None:
    """
    When a rank goes on from the middle of a step, with what routers had counted, then it counts from nothing.
    """
    (found,) = once("counted", "--experts", "--balancing", "global_aux_loss", "--instances", "1")
    assert found["counts"]
    assert not any(found["counts"])


def test_stages_with_other_settings_are_refused(once: Once) -> None:
    """
    When one stage of a pipeline has another learning rate than the others, which Megatron would have them agree on,
    then all are told when the first groups are formed.
    """
    first, last = once("stages", "--pp", "2", "--instances", "1", world=2)
    assert "stage 1 of the pipeline has the groups of parameters" in first["refused"]
    assert "stage 0 of the pipeline has the groups of parameters" in last["refused"]


def test_what_cannot_be_kept_is_refused_when_it_is_handed_over(once: Once) -> None:
    """
    When a module has a setting that cannot be gone on with, a scheduler is left out, or the data tells no position, then
    `enable` says so.
    """
    (found,) = once("handed", "--instances", "1")
    setting, scheduler, position = found["refused"]
    assert setting.startswith("cuda_graph_impl is local, which the adaptor megatron cannot handle")
    assert scheduler.startswith("there is a scheduler (OptimizerParamScheduler) for this optimizer")
    assert position == "data must have state_dict() and load_state_dict(); a Namespace has not"


def test_a_timer_that_was_running_can_be_started_again(once: Once) -> None:
    """
    When a step is broken off while Megatron takes its time, then the next one can take its own.
    """
    (found,) = once("timed", "--instances", "1")
    assert found["runs"]
