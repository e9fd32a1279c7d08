"""
The controller: hears reports, has the job machine judge, says orders. One leads at a time.
"""
