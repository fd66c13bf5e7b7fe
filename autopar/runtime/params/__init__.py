"""Parameters and gradients on a rank: flat buffers, reduction over replicas, ZeRO-1, compute copies."""
