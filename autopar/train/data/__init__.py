"""Data sets, transforms, samplers and loaders whose order does not depend on the plan."""
