"""
The imports of the fork server from which test ranks are forked.

The imports are those of a training process.
"""

from tft_pytorch.preload import preload

preload()
