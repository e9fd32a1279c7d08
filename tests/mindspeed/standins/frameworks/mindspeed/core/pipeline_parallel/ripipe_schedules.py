"""
A placeholder for a pipeline schedule that no test uses.
"""

forward_backward_ripipe_pipelining = None
