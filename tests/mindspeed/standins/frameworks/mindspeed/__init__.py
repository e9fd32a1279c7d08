"""
A stand-in for the parts of MindSpeed that MindSpeed-LLM's high availability uses.
"""
