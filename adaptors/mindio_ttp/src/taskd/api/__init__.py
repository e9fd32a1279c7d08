"""
The modules of the package `taskd` that msrun imports.
"""
