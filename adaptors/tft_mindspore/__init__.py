"""
The adaptor for MindSpore.

What reads the environment and names files is used before MindSpore is imported, and without it: so
that is imported nowhere here before it is needed.
"""
