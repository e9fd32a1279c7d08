"""
The package in which Apex has its layer norms.
"""
