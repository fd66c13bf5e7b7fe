"""How do people question, check and compare plans? The command line, and everything that it computes and prints.

Input: the arguments of a shell, which name a model or a plan file. Output: tables, pictures, traces and files.

Folders in reading order:

- `cli/`: one module per command; each parses flags, calls one of the folders below and prints its result.
- `explain/`: a plan's step by activity, advice, questions such as "why not tp=4", and the difference of two plans.
- `simulate/`: the timeline and the memory of a planned step, without devices.
- `parity/`: the proof that a split model computes what one device computes.
- `bench/`: measured speed and memory, compared with predictions and with other libraries.
- `doctor/`: whether this machine is fit for training.
- `report/`: the tables, pictures and Chrome traces of these results.

``autopar explain plan.json`` and ``autopar simulate plan.json`` need neither the model nor a device.
"""
