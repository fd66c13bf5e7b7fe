"""`autopar profile`: measures this machine into a cost-model file.

Input: a type and number of devices. Output: the text of a cost-model file, which holds constants and points.

Files in reading order:
    cases.py                which measurements to make
    points.py               a measurement: a case, its FLOPs and bytes, its seconds; files of interrupted runs
    kernels.py              runs of one device, and of operations without work
    collectives.py          runs of several ranks; async_tp.py: linear layers with a collective
    worker.py               measures the cases in one process per device
    measure.py              starts the processes
    launched.py             measures with the processes of torchrun or srun
    fit_constants.py        constants.py from points, by curves.py and least_squares.py; fit_network.py: between nodes
    write_cost_model.py     the file; preserved.py: sections of the old file that are not measured
"""
