"""
The process of the rendezvous store: `python -m tft.agent.store ADAPTOR HOST FD`.

A process of its own, so that neither a rank nor the agent takes it along when it ends. The port
is written to the inherited descriptor FD once connections are accepted.
"""

import os
import sys

from tft.errors import UsageError
from tft.parent_death import die_with_parent
from tft.plugins import load_adaptor


def main() -> None:
    """
    Have the adaptor serve its store until this process is ended.
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
