"""All that the command line runs and prints."""
