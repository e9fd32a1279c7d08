"""
`python -m tft` is `tft`.
"""

from tft.cli.main import main

main()
