"""
The modules of this package that msrun imports.
"""
