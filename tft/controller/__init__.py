"""
The controller of a job. The controller is a process that receives reports from agents, ranks and
launchers. It passes each report to the job machine, a state machine that decides how the job
continues. Then the controller publishes the orders that the job machine returns. Only one
controller leads a job at a time.
"""
