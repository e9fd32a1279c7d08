"""
The controller of a job. This process receives reports and passes them to the job machine, the state
machine that decides how the job goes on. Then it publishes the orders that the job machine returns.
Only one controller leads a job at a time.
"""
