"""`python -m tidemill` is the command line."""

from tidemill.cli import main

main()
