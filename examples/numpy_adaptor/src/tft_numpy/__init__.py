"""
An adaptor of tft for toynet: an example of a framework that tft does not know.

    adaptor.py    the hooks, as tft calls them
    state.py      the training state of this process: what the hooks keep, move, save and load
"""
