"""The hot loop: executor, CUDA graphs, staging of inputs, metrics of steps."""
