"""
The process of the rendezvous store: `python -m tft.worker.store ADAPTOR HOST FD`, or a process that
`tft.worker.fork_server` forks, which has imported the framework already.

The store has its own process, so that the end of a rank does not end the store, and a failure of
the store does not end the agent. The process writes the store's port to the inherited descriptor FD
once the store accepts connections.
"""

import os
import sys

from tft.errors import UsageError
from tft.parent_death import die_with_parent, name_process
from tft.plugins import load_adaptor


def main() -> None:
    """
    Serve the store that the command line names, as `serve` does.
    """
    die_with_parent()
    adaptor, host, descriptor = sys.argv[1:]
    serve(adaptor, host, int(descriptor))


def serve(adaptor: str, host: str, descriptor: int) -> None:
    """
    Let the adaptor serve its store until this process is killed. Exits with an error message when
    the adaptor cannot be used, or when the adaptor ends the store by itself.
    """
    name_process("tft-store")

    def opened(port: int) -> None:
        os.write(descriptor, str(port).encode())
        os.close(descriptor)

    try:
        load_adaptor(adaptor).hook.tft_store(host=host, port=0, opened=opened)
    except UsageError as refused:
        sys.exit(f"tft: {refused}")
    sys.exit(f"tft: the adaptor {adaptor!r} ended its store by itself")


if __name__ == "__main__":
    main()
