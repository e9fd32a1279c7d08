"""
The worker: the tft half of a training process. `launch` is how the process begins, `session` what
`tft.init` returns.
"""
