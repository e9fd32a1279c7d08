"""
The controller: it receives reports, passes them to the job machine, and publishes the machine's
orders. Only one controller leads at a time.
"""
