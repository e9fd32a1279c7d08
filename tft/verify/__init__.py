"""
`tft verify`: runs a user's script undisturbed and with killed ranks, and compares everything.
"""
