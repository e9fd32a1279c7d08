"""
The words: what the processes of a job say to each other, and how it looks on the wire.
"""
