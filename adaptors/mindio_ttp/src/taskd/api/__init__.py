"""
What msrun imports.
"""
