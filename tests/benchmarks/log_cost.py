"""
What `session.log` costs the training thread: the time of a call, by the number of values.

    python -m tests.benchmarks.log_cost
"""

import json
import tempfile
import time
from pathlib import Path

from tft.worker.records import Records

CALLS = 20_000


def main() -> None:
    """
    Print a line of JSON for each number of values. Times are in microseconds.
    """
    for number in (1, 5, 20):
        values = {f"train/value{place}": 0.1234567 * (place + 1) for place in range(number)}
        taken = []
        with tempfile.TemporaryDirectory() as directory:
            records = Records(Path(directory), 0)
            for step in range(CALLS):
                began = time.perf_counter_ns()
                records.log(step, values)
                taken.append(time.perf_counter_ns() - began)
        taken.sort()
        row = {"median": taken[CALLS // 2] / 1000, "p99": taken[CALLS * 99 // 100] / 1000}
        print(json.dumps({"benchmark": "log_cost", "values": number, **row}))


if __name__ == "__main__":
    main()
