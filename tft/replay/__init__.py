"""
The story of a run: recorded, judged again, and printed.
"""
