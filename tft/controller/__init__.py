"""
The controller: the process that receives reports, passes them to the job machine (the state machine
that decides how the job goes on), and publishes the orders that this machine returns. Only one
controller leads a job at a time.
"""
