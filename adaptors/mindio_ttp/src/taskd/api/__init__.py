"""
The modules of the package `taskd` that msrun, the launcher of MindSpore, imports.
"""
