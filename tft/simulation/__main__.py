"""
Run the simulated schedules of many seeds, and print a summary of the results. Example: `python -m
tft.simulation --seeds 0:2000`.
"""

import argparse
import sys
from pathlib import Path

from tft.simulation.many import Tally, run_many, show, show_pairs
from tft.simulation.rare import rare
from tft.simulation.shrink import explain


def main() -> int:
    """
    Run the seeds that the command line names. Return the exit status: 0 when every invariant held
    in every run, otherwise 1.
    """
    parser = argparse.ArgumentParser(prog="python -m tft.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0:2000", help="the seeds to run: FROM:TO, or one seed")
    parser.add_argument(
        "--rare", action="store_true", help="also run the schedules that are written by hand"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="the number of processes that run the seeds"
    )
    parser.add_argument(
        "--stories",
        type=Path,
        default=Path("/tmp"),
        help="the directory for the stories of runs that fail",
    )
    parser.add_argument(
        "--explain",
        type=int,
        default=3,
        help="the number of failing schedules to make as small as possible",
    )
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    written = rare() if arguments.rare else ()
    tally: Tally = run_many(seeds, jobs=arguments.jobs, written=written)
    sys.stdout.write(show(tally) + show_pairs(tally))
    for failed in tally.failed[: arguments.explain]:
        sys.stdout.write(explain(failed.schedule, arguments.stories))
    return 1 if tally.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
