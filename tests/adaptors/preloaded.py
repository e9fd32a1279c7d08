"""
What the process that ranks are forked from imports: all that a training process has.
"""

from tft_pytorch.preload import preload

preload()
