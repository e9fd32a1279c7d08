"""
The judgement: what should be done about what happened. Pure; time comes in with the events.
"""
