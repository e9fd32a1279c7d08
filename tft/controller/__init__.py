"""
The controller: receives reports, lets the job machine judge them, and publishes orders. One
controller leads at a time.
"""
