"""
Imports the modules that a `Trainer` needs, before the user's script starts. The other ranks wait
while a replacement process starts, so this process must not spend that time on imports.
"""

import tft_pytorch.preload

from tft_transformers.versions import check_versions


def preload() -> None:
    """
    Import the modules that a `Trainer` needs, which takes some seconds. Start no thread and touch no
    device, so that the process can be forked.

    Raises `UsageError` if Transformers or accelerate is missing, or is another version.
    """
    check_versions()
    tft_pytorch.preload.preload()

    with tft_pytorch.preload.without_threads_of_arrow():
        import transformers.trainer  # noqa: F401 (imports accelerate, too)

        import tft_transformers.trainer  # noqa: F401
        from tft_transformers.local import attributes_of_trainers

    attributes_of_trainers()  # reads the source of the Trainer, and caches the result
