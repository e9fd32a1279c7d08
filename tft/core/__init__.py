"""
The judgement: decides what to do about events. All code here is pure; the time comes with the
events.
"""
