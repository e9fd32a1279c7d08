"""
Where Apex has its layer norms.
"""
