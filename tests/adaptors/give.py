"""
A program that serves a shard to other processes. Its tensor counts as one on a device: give.py JOB
MEGABYTES.

It prints its address, and serves the shard until its standard input ends.
"""

import sys

import torch
from tft_pytorch import memory

from tft.spi.types import ShardPayload
from tft.transfer import ShardServer


def main() -> None:
    """
    Serve a shard with one tensor of the given number of megabytes.
    """
    job, size = sys.argv[1], int(sys.argv[2]) << 20
    memory.in_place = lambda tensor: False
    tensor = torch.arange(size // 8)
    payload = ShardPayload(meta=b"", buffers=(memory.offered("weights", tensor),))
    server = ShardServer("127.0.0.1", job, lambda shard, step: payload)
    server.start()
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
