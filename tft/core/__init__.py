"""
The decisions of tft: the state machines that turn events into orders. All code here is pure; it
reads no clock, because every event carries its time.
"""
