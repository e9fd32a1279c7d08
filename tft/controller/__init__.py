"""
The controller: the process that receives reports, passes them to the job machine (the state machine
that decides), and publishes the machine's orders. Only one controller leads a job at a time.
"""
