"""
Replacements for the parts of a job, for tests of tft and of adaptors and plugins.
"""
