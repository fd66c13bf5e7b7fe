"""Reads the files of cost_models/."""
