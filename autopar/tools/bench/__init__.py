"""`autopar bench`: a plan and the usual ways to train without autopar, timed on this machine.

Input: a `request.BenchRequest`. Output: a `result.BenchResult` with one row per baseline and variant.

Files in reading order:
    request.py              the request
    row.py, timeline.py     a baseline's row, a measured step; result.py: all rows
    baselines/              the baselines, and how each trains (registry.py lists them)
    training.py             the interface between baselines and the worker
    task.py                 payload of the worker processes, with model and batch
    worker.py               builds a baseline and times its steps
    outcome.py              runs the workers of one baseline
    run.py                  makes the plans, runs the baselines, collects the rows
    calibration.py          `--calibrate`: predicted against measured, for a plan of every mesh
    calibration_point.py    one of these plans
    by_kernel.py            `--by-kernel`: kernels of a step against the prices of its operations
    kernel_trace.py, kernel_rows.py                     profile of a step, kinds of kernels, their sums
    priced_ops.py           prices by operation and shapes; priced_kernels.py: of kernels between products
    bubble.py, parts.py, description.py
"""
