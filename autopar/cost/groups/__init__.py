"""Groups of operations: cost graph, memory of weights, saved activations, checkpoint segments."""
