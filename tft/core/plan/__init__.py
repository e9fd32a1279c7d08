"""
The planner: pure functions that turn the facts about an incident into a plan. The planner finds the
possible strategies (`retry`, `recover`, …) and a step that all ranks can return to. It also finds
which rank fetches state from which, and which rank writes which part of a last checkpoint.
"""
