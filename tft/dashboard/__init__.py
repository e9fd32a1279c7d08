"""
What `tft dashboard` does: it follows a job from outside and serves one page about it. It has no part
in the job, and can end at any time.
"""
