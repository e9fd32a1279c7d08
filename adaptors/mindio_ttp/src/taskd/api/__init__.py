"""
The modules that msrun imports.
"""
