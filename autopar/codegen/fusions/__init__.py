"""Fusions: which operations of a program are replaced by faster ones of `autopar.ops`?

Input is an `ir.program.Program` or its operations in order; output is the same with some operations replaced.

- `patch_embed`: convolutions of patches become one GEMM (compiled programs).
- `pad_groups`: groups of convolutions in 16 bits are padded to a power of two (compiled programs on CUDA devices).
- `wgrad`: linear layers accumulate into the main gradient in their wgrad GEMM (compiled training programs).
- `split_backward`: layers leave their weights' gradients for later (zero-bubble schedules).
- `async_tp`: a collective and its linear layer become one operator that overlaps them (async tensor parallelism).
"""
