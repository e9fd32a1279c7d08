"""
The process of the rendezvous store, at which ranks meet to form process groups. The agent runs
`python -m tft.worker.store ADAPTOR HOST FD`, or it lets the fork server (`tft.worker.fork_server`),
which has imported the framework already, fork the process.

The store has its own process, so that the end of a rank does not end the store, and a failure of
the store does not end the agent. The process writes the store's port to the inherited descriptor FD
once the store accepts connections, and then its signs of life (`tft.pulse`).
"""

import os
import sys

from tft.errors import UsageError
from tft.parent_death import die_with_parent, name_process
from tft.plugins import load_adaptor
from tft.pulse import BYTE, Pulse


def main() -> None:
    """
    Serve the store with the adaptor, host and descriptor of the command line.
    """
    die_with_parent()
    adaptor, host, descriptor = sys.argv[1:]
    serve(adaptor, host, int(descriptor))


def serve(adaptor: str, host: str, descriptor: int) -> None:
    """
    Let the adaptor serve its rendezvous store at `host` until this process is killed, and write the
    store's port to the file descriptor `descriptor`. Exit with an error message if the adaptor
    cannot be loaded, or if the adaptor ends the store by itself.
    """
    name_process("tft-store")

    def opened(port: int) -> None:
        os.write(descriptor, str(port).encode() + BYTE)
        Pulse(descriptor).beat_in_thread()

    try:
        load_adaptor(adaptor).hook.tft_store(host=host, port=0, opened=opened)
    except UsageError as refused:
        sys.exit(f"tft: {refused}")
    sys.exit(f"tft: the adaptor {adaptor!r} ended its store by itself")


if __name__ == "__main__":
    main()
