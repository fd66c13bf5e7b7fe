"""Memory of a rank: allocator settings, peaks, errors when it runs out."""
