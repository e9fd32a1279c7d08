"""
For tests, ours and those of adaptor and plugin authors: parts that play the rest of a job.
"""
