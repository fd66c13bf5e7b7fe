"""One operation: arithmetic, saved tensors, memory traffic, overlap."""
