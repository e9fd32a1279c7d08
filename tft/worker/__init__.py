"""
The worker: the code of tft that runs in a training process. `launch` prepares the process and runs
the script. `session` defines the `Session` that `tft.init` returns.
"""
