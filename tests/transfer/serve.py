"""
A source in a separate process, for tests that kill or stop it. It serves one shard until its
standard input ends. Usage: serve.py JOB SIZE SEED. Prints its address.
"""

import sys

from tests.transfer.peers import META, content
from tft.spi.types import Buffer, ShardPayload
from tft.transfer import ShardServer


def main() -> None:
    """
    Serve `content(size, seed)` as one buffer.
    """
    job, size, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    held = memoryview(content(size, seed))

    def give(shard: str, step: int) -> ShardPayload:
        return ShardPayload(meta=META, buffers=(Buffer(name="weights", view=held),))

    server = ShardServer("127.0.0.1", job, give)
    server.start()
    sys.stdout.write(server.address + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main()
