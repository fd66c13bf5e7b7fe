"""Does a plan compute what one device computes? Both train the same steps, and every tensor is compared.

Input: an unmodified model, a batch and the constraints of a plan. Output: a `Parity`, one `Row` per quantity (outputs,
loss, gradients, weights, buffers); `tools/report/parity_table.py` prints it.

The reference is the unmodified model in this process. In mixed precision it runs under torch.autocast; a second
reference in float32 measures how much rounding matters.

Files in reading order:

- `compare.py`: the whole comparison, and a default loss.
- `reference.py`: the model on one device with the plan's microbatches.
- `difference.py`: distance of two tensors and its tolerance.
"""
