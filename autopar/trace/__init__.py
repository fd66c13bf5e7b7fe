"""The first stage: an ``nn.Module`` and example inputs become an `ir.graph.Graph`."""
