"""The command line: ``autopar plan | explain | simulate | check | train | export | codegen | bench | profile``."""

from autopar.cli.app import app, main

__all__ = ["app", "main"]
