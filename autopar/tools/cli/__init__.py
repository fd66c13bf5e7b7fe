"""The command line: ``autopar plan | explain | simulate | check | train | export | codegen | bench | profile``."""
