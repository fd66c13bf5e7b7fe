"""A run on disk: its folder, its state, its weights and its reports."""
