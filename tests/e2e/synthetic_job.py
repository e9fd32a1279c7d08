"""
The heartbeats of a large job that does not exist: a broker, and one process that speaks for its
controller and all its agents.

    synthetic_job.py RUN_DIR [--nodes N] [--each N] [--beats N] [--changes N]

Each of N nodes has `--each` ranks and sends `--beats` heartbeats in a second. In each second,
`--changes` ranks enter or leave their training loops. The process ends when its parent does.
"""

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import zmq

from tft.parent_death import die_with_parent
from tft.protocol.codec import encode
from tft.protocol.messages import Beat, Envelope, Lead, Message, Position, Pulse
from tft.protocol.topics import BEATS, ORDERS

STEP = 0.5
"""Seconds for a step."""


def written(run_dir: Path, broker: str, nodes: int, each: int) -> None:
    """
    Write the records of the job.
    """
    run_dir.mkdir(parents=True)
    settings = {
        "job": "synthetic", "run": "r", "broker": broker, "nnodes": nodes, "nproc_per_node": each,
        "curve": None, "checkpoint_dir": str(run_dir / "checkpoints"), "checkpoint_name": "{step}",
    }  # fmt: skip
    temporary = run_dir / "job.tmp"
    temporary.write_text(json.dumps({"command": ["train.py"], "settings": settings}))
    unix, now = time.time(), time.monotonic()
    head = {
        "at": now, "unix": unix, "run": "r", "opened": now, "epoch": 1, "world": nodes * each,
        "from_step": 0, "first_incident": 1,
    }  # fmt: skip
    rows = [head, {"at": now, "unix": unix, "state": "healthy", "incident": 0}]
    (run_dir / "progress.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary.rename(run_dir / "job.json")


def beat(node: int, each: int, outside: set[int], began: float) -> Beat:
    """
    Return the heartbeat of a node now. Its ranks train, except those in `outside`.
    """
    now = time.monotonic()
    step = int((now - began) / STEP)
    pulses = tuple(
        Pulse(
            rank=rank, incarnation=0, position=Position(step=step, window=False),
            training=rank not in outside, moved=began + step * STEP,
        )
        for rank in range(node * each, (node + 1) * each)
    )  # fmt: skip
    return Beat(node=node, pulses=pulses, at=now)


def speak(voice: "zmq.Socket[bytes]", run_dir: Path, args: argparse.Namespace) -> None:
    """
    Send heartbeats and `Lead` for ever, at an even pace.
    """
    draw, outside, began = random.Random(1), set[int](), time.monotonic()
    world, sent, changed, said = args.nodes * args.each, 0, 0, -1
    # a heartbeat is encoded when something in it has changed, because this costs most of the time
    frames: dict[int, tuple[int, bytes]] = {}
    progress = (run_dir / "progress.jsonl").open("a")
    while True:
        passed = time.monotonic() - began
        while changed < int(passed * args.changes):
            changed += 1
            rank = draw.randrange(world)
            outside ^= {rank}
            frames.pop(rank // args.each, None)
        while sent < int(passed * args.nodes * args.beats):
            node, step = sent % args.nodes, int((time.monotonic() - began) / STEP)
            if node not in frames or frames[node][0] != step:
                frames[node] = step, framed(beat(node, args.each, outside, began))
            voice.send_multipart((BEATS, frames[node][1]))
            sent += 1
        if int(passed) > said:
            said = int(passed)
            voice.send_multipart((ORDERS, framed(Lead(epoch=1, heard={}, state="healthy"))))
            row = {
                "at": began + passed, "unix": time.time(), "step": int(passed / STEP),
                "ranks": world - len(outside),
            }  # fmt: skip
            progress.write(json.dumps(row) + "\n")
            progress.flush()
        voice.poll(10)  # nothing comes, so this waits for 10 ms


def framed(message: Message) -> bytes:
    """
    Return a message as the bus sends it.
    """
    return encode(Envelope(job="synthetic", sender="node.0/0", number=0, message=message))


def main() -> None:
    """
    Start a broker, and speak over it.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--each", type=int, default=8)
    parser.add_argument("--beats", type=float, default=10)
    parser.add_argument("--changes", type=float, default=100)
    args = parser.parse_args()
    die_with_parent()
    command = [sys.executable, "-m", "tft", "broker", "--host", "127.0.0.1"]
    broker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert broker.stderr is not None
    address = broker.stderr.readline().rpartition(" ")[2].strip()
    written(args.run_dir, address, args.nodes, args.each)
    with zmq.Context() as context, context.socket(zmq.PUB) as voice:
        voice.connect(f"tcp://{address}")
        speak(voice, args.run_dir, args)


if __name__ == "__main__":
    main()
