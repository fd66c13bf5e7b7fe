"""A planned training step played through: who runs what when, and what lies in memory, from the plan alone."""
