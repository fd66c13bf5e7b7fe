"""Sharding rules: what of an operation can be split over ranks, as one line of text or a function of its shapes."""
