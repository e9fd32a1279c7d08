"""
The planner: pure functions that turn facts into plans. They find a step that all ranks can return
to, the transfers of state, the writers of a last checkpoint, and the possible strategies.
"""
