"""Chooses mesh, shardings, pipeline cuts and microbatches: integer programs inside a search with bounds."""
