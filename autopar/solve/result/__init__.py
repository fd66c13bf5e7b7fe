"""From a decision to a plan: assembly, alternatives, bounds of the step."""
