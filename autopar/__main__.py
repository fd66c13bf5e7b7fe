"""``python -m autopar``: the command line."""

from autopar.tools.cli.app import main

main()
