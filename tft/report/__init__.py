"""
What `tft report` does: it reads the records of a job in its run directory, computes how the time was
spent, and writes both as a page.
"""
