"""
What `tft report` does: it reads the records of a job from the job's run directory, computes how the
job's time was spent, and writes a page about both.
"""
