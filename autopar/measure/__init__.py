"""Room of measurements: how many seconds do kernels, messages and compiled regions take on this machine?

Input: cases of `autopar profile`, or the regions of a graph. Output: `machine.points.MeasuredPoint`, from which a
cost-model file is fitted, or `regions.cache.RegionTimes`, by which a plan's prices are scaled.

Files in reading order:
    timer.py      median and spread of one run: eager, captured, or sustained
    device.py     the settings under which a number holds
    workers.py    `run_workers`: processes that measure, and their side; __main__.py starts one
    compile_ahead.py, compile_preload.py   regions compiled by processes before the first step
    machine/      `autopar profile`: measures a machine into a cost model
    regions/      `--cost measured | auto`: times the compiled regions of a plan's graphs

    >>> case = next(case for case in cases("cpu", 2) if case.kind == "matmul")
    >>> case.name, kernel_runs(case, torch.device("cpu")).ops
    ('matmul forward float32 16x64x64', (OpCounts(flops=131072.0, num_bytes=24576),))
"""
