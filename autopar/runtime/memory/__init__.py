"""Memory of a rank: settings of the allocators, measured peaks, and the error for a device that is out of memory.

Question: how much memory does a rank need beyond the plan's prediction, and what does its user read when it runs out?
Input: the process and its device, set up before the first tensor; for the error, a `Rank` and the exception.
Output: bytes (resident, peak, of tensors alone), or a `DeviceMemoryError` with the peak and the predicted bytes.

Files in reading order: cuda_allocator (expandable segments on GPUs), host_malloc (freed memory stays with the process),
peaks (measured bytes), out_of_memory (the error).
"""
