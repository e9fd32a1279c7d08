"""
The planner: pure functions that turn the facts about an incident into a plan. They find the
possible strategies (`retry`, `recover`, …) and a step that all ranks can return to. They also find
which rank fetches state from which, and which rank writes which part of a last checkpoint.
"""
