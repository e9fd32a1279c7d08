"""
A stand-in for the parts of Apex that MindSpeed-LLM imports.
"""
