"""
The decisions of tft: the state machines that turn events into orders. All code here is pure: it
does no I/O, and it needs no clock, because every event carries its time.
"""
