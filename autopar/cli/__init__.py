"""The command line: ``autopar plan | simulate | check | train | export | codegen | bench``."""

from autopar.cli.app import app, main

__all__ = ["app", "main"]
