"""Points of the search: meshes, schedules, microbatches, and their lower bounds."""
