"""
Makes `python -m tft` the same as the command `tft`.
"""

from tft.cli.main import main

main()
