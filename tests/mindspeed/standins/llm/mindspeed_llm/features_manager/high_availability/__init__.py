"""
A part of the stand-in for MindSpeed-LLM.
"""
