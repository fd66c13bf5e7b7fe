"""Communication between ranks: process groups, point-to-point, symmetric memory, collectives."""
