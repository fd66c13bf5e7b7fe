"""The command line: ``autopar plan | check | train | export | codegen | bench | profile``."""

from autopar.cli.app import app, main

__all__ = ["app", "main"]
