"""
The worker: the code of tft that runs in a training process. `launch` starts the process. `session`
has the `Session` that `tft.init` returns.
"""
