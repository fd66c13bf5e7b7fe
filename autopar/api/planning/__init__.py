"""``autopar.plan``: prices, search, refinement, measured prices."""
