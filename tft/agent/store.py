"""
The process of the rendezvous store: `python -m tft.agent.store ADAPTOR HOST FD`.

The store has its own process, so that the end of a rank does not end the store, and a failure of
the store does not end the agent. The process writes the store's port to the inherited descriptor FD
once the store accepts connections.
"""

import os
import sys

from tft.errors import UsageError
from tft.parent_death import die_with_parent
from tft.plugins import load_adaptor


def main() -> None:
    """
    Let the adaptor serve its store until this process is killed. Exits with an error message when
    the adaptor cannot be used, or when the adaptor ends the store by itself.
    """
    die_with_parent()
    adaptor, host, descriptor = sys.argv[1:]

    def opened(port: int) -> None:
        os.write(int(descriptor), str(port).encode())
        os.close(int(descriptor))

    try:
        load_adaptor(adaptor).hook.tft_store(host=host, port=0, opened=opened)
    except UsageError as refused:
        sys.exit(f"tft: {refused}")
    sys.exit(f"tft: the adaptor {adaptor!r} ended its store by itself")


if __name__ == "__main__":
    main()
