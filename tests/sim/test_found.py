"""
Schedules that broke a promise once, each as small as it could be made.
"""

from dataclasses import replace

import pytest

from tft.testing.cluster.run import run
from tft.testing.cluster.schedule import QUICK, Mishap, Schedule, Trouble

FOUND = {
    "a last replacement that is on its way was counted as one too many, and nobody told a rank "
    "outside that all was done": Schedule(
        seed=0,
        world=2,
        steps=6,
        policy=replace(QUICK, respawns=1),
        mishaps=(Mishap(what="kill", target=1, when="phase", name="window", number=6),),
    ),
    "with its node every copy of a shard was ended": Schedule(
        seed=0,
        world=2,
        steps=6,
        policy=replace(QUICK, replace="node"),
        mishaps=(Mishap(what="kill", target=1, when="phase", name="sums", number=3),),
    ),
    "a rank that came back took the data position of a step it had not done": Schedule(
        seed=198,
        world=12,
        nodes=4,
        topology="unsharded",
        steps=4,
        policy=replace(QUICK, respawns=1),
        standbys=2,
        trouble=Trouble(double=0.2),
        mishaps=(Mishap(what="kill", target=9, when="phase", name="sums", number=2),),
    ),
    "a node that was lost before its first beat was never missed": Schedule(
        seed=1650,
        world=8,
        nodes=8,
        breaks=False,
        mishaps=(Mishap(what="node", delay=0.129, loud=False),),
    ),
    "a controller that took over at the very end spoke in the epoch of the one before": Schedule(
        seed=0,
        world=23,
        steps=7,
        standbys=2,
        trouble=Trouble(delay=0.02, loss=0.02),
        mishaps=(Mishap(what="deposed", when="state", name="rolling back"),),
    ),
    "a node had gone and come back before anybody missed it, and nobody missed its ranks": Schedule(
        seed=0,
        world=4,
        nodes=4,
        steps=12,
        policy=replace(QUICK, flaps=1),
        breaks=False,
        standbys=1,
        mishaps=(
            Mishap(what="controller", target=1, delay=1.27160356526873, lasting=6.0),
            Mishap(what="node", target=2, delay=3.311107977871585, lasting=6.0, loud=False),
        ),
    ),
    "a process that nobody had asked for spoke for a rank": Schedule(
        seed=183,
        world=14,
        nodes=3,
        policy=replace(QUICK, respawns=1, attempts=2),
        derives=False,
        breaks=False,
        resume=2,
        trouble=Trouble(loss=0.1, double=0.05),
        mishaps=(Mishap(what="impostor", target=13, delay=2.0214102780805043, lasting=6.0),),
    ),
    "a rank that died before it had loaded was given what the others shared, not what was its own": (
        Schedule(
            seed=0,
            world=9,
            copies=4,
            steps=9,
            policy=replace(QUICK, max_incidents=2),
            resume=2,
            mishaps=(Mishap(what="stop", target=3, delay=1.1346703007389982, lasting=6.0),),
        )
    ),
    "room for one rank was taken for room for six": Schedule(
        seed=101387,
        world=48,
        nodes=8,
        copies=1,
        steps=8,
        policy=replace(QUICK, max_incidents=1, flaps=2, advised=True, respawns=1),
        strategies=("retry", "recover", "dump"),
        derives=False,
        spares=(1,),
        checkpoints=2,
        breaks=False,
        backups=2,
        mishaps=(
            Mishap(what="node", target=3, delay=1.8825337841135794, lasting=2.0),
            Mishap(what="come", target=8, delay=2.6234129776801525, lasting=0.05),
        ),
    ),
    "the last to finish was never heard, and waited for": Schedule(
        seed=101966,
        world=2,
        copies=1,
        steps=11,
        policy=replace(QUICK, max_incidents=2, flaps=2, attempts=2),
        mishaps=(
            Mishap(what="broker", delay=1.0689342584717263, lasting=2.0),
            Mishap(what="stop", target=1, delay=3.0741027702516717, lasting=2.0),
        ),
    ),
    "a rank whose copy had failed began with it, since nothing was trained yet": Schedule(
        seed=108386,
        world=48,
        nodes=4,
        topology="strided",
        steps=5,
        policy=replace(QUICK, flaps=2, skip_batch=True),
        derives=False,
        breaks=False,
        standbys=1,
        trouble=Trouble(delay=0.02, loss=0.02, double=0.2),
        mishaps=(
            Mishap(what="notice", target=40, delay=1.1111533651782528, lasting=6.0, kind="memory"),
            Mishap(what="node", target=1, delay=1.909935618346283, lasting=6.0, loud=False),
        ),
    ),
    "ranks that had left gave away what they held of steps that were trained anew": Schedule(
        seed=109635,
        world=6,
        topology="unsharded",
        steps=6,
        policy=replace(QUICK, flaps=2, replace="node", advised=True, respawns=1, attempts=2),
        derives=False,
        breaks=False,
        resume=2,
        trouble=Trouble(delay=0.002),
        mishaps=(
            Mishap(what="bad batch", target=1, when="phase", name="forward", number=5, by=1.67),
            Mishap(what="kill", target=3, when="phase", name="window", number=2, by=1.345),
        ),
    ),
    "what a rank that had left could not save itself nobody saved": Schedule(
        seed=14321,
        world=62,
        nodes=4,
        topology="strided",
        copies=4,
        policy=replace(QUICK, spread_savers=True, advised=True),
        derives=False,
        breaks=False,
        trouble=Trouble(delay=0.05),
        mishaps=(
            Mishap(what="stop", target=16, delay=2.992638273747552, lasting=6.0),
            Mishap(what="agent", target=2, when="state", name="healthy", by=2.539, lasting=2.0),
            Mishap(
                what="kill",
                target=20,
                when="order",
                name="rollback",
                delay=0.15875368660001143,
                by=3.118929949104047,
            ),
        ),
    ),
    "a checkpoint that could not be read once ended the start of a resumed job": Schedule(
        seed=0,
        world=2,
        copies=3,
        steps=8,
        breaks=False,
        resume=2,
        skew=0.3,
        mishaps=(
            Mishap(
                what="fail", target=-1, when="order", name="load", number=1, by=1.12, lasting=2.0
            ),
        ),
    ),
    "a checkpoint that was away for a moment ended the start of a resumed job": Schedule(
        seed=18647,
        world=2,
        steps=8,
        policy=replace(QUICK, max_incidents=2, replace="node"),
        breaks=False,
        resume=2,
        skew=5000.0,
        trouble=Trouble(delay=0.1, loss=0.1),
        mishaps=(Mishap(what="unreadable", target=1, delay=1.7654845586320522, lasting=6.0),),
    ),
    "a rank that had just been given another process when its node was lost got one more": Schedule(
        seed=0,
        world=16,
        nodes=8,
        copies=4,
        steps=4,
        policy=replace(QUICK, replace="node", skip_batch=True, attempts=2),
        strategies=("retry", "recover", "dump"),
        derives=False,
        room=2,
        skew=5000.0,
        mishaps=(
            Mishap(what="partition", target=1, delay=0.9627479516492393, lasting=6.0),
            Mishap(what="kill", target=3, when="order", name="stop", number=1, by=0.8, lasting=0.5),
        ),
    ),
    "advice to what was offered before a node was given up was taken for advice to what is left": (
        Schedule(
            seed=611861,
            world=5,
            nodes=3,
            steps=9,
            policy=replace(QUICK, advised=True, respawns=1, attempts=2),
            breaks=False,
            skew=0.3,
            trouble=Trouble(loss=0.1, double=0.2, reorder=0.3),
            mishaps=(
                Mishap(what="bad batch", target=2, when="phase", name="window", number=3, by=1.05),
                Mishap(
                    what="notice",
                    target=1,
                    when="phase",
                    name="window",
                    number=4,
                    by=2.95,
                    lasting=0.5,
                    kind="node",
                ),
                Mishap(what="network", target=3, when="phase", name="sums", number=2, by=0.79),
            ),
        )
    ),
    "a process that nobody had asked for was heard when the job was over, and resumed": Schedule(
        seed=26625,
        world=2,
        steps=4,
        policy=replace(
            QUICK,
            enable=frozenset({"dump", "migrate", "retry", "scale_out"}),
            replace="node",
            respawns=1,
        ),
        strategies=("retry", "recover", "dump"),
        resume=2,
        skew=0.3,
        standbys=2,
        mishaps=(
            Mishap(what="deposed", target=1, delay=1.1639011108781983, lasting=2.0, kind="deaf"),
            Mishap(
                what="impostor",
                when="state",
                name="ended",
                delay=8.64621027616419e-05,
                by=1.5997047805341431,
                lasting=6.0,
            ),
        ),
    ),
    "a rank that had moved went back to a step that it had captured elsewhere": Schedule(
        seed=0,
        world=3,
        steps=12,
        policy=replace(
            QUICK,
            enable=frozenset({"dump", "migrate", "recover", "retry", "scale_in"}),
            flaps=2,
            respawns=1,
        ),
        derives=False,
        spares=(7,),
        room=2,
        backups=2,
        mishaps=(
            Mishap(
                what="notice",
                target=-1,
                when="order",
                name="restore",
                by=2.9033614709765643,
                loud=False,
                kind="straggler",
            ),
            Mishap(
                what="bad batch",
                target=1,
                when="phase",
                name="sums",
                number=5,
                by=2.727258448080654,
                lasting=0.5,
            ),
        ),
    ),
    "the last attempt did not wait for the store that was on its way": Schedule(
        seed=20990,
        world=12,
        copies=4,
        steps=6,
        policy=replace(QUICK, skip_batch=True, attempts=2),
        derives=False,
        skew=0.3,
        trouble=Trouble(reorder=0.3),
        mishaps=(Mishap(what="store", target=1, delay=0.6888363243594153, lasting=2.0),),
    ),
    "what is a rank's own was not saved when it could not take its copy back": Schedule(
        seed=0,
        world=2,
        copies=4,
        steps=8,
        policy=replace(
            QUICK,
            enable=frozenset({"dump", "migrate", "recover"}),
            flaps=1,
            respawns=1,
            attempts=2,
        ),
        breaks=False,
        backups=2,
        skew=5000.0,
        mishaps=(
            Mishap(what="fail", target=-1, when="order", name="restore", by=2.674, lasting=6.0),
            Mishap(
                what="pollute",
                target=1,
                when="phase",
                name="sums",
                number=3,
                by=2.480006849697596,
                lasting=6.0,
            ),
        ),
    ),
}


@pytest.mark.parametrize("schedule", FOUND.values(), ids=FOUND.keys())
def test_what_was_found_once_does_not_come_again(schedule: Schedule) -> None:
    """
    When a schedule that once broke a promise runs again, then every promise is kept.
    """
    assert not run(schedule).how
