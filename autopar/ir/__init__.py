"""Every frozen type that crosses stages, its invariants and its printed form."""
