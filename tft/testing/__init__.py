"""
Parts that imitate the rest of a job, for tests of tft and of adaptors and plugins.
"""
