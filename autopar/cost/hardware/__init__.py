"""Which machine does a cost model describe? Reads the files of cost_models/.

Input is a machine's name or the path of a TOML file; output is an `ir.hardware.Hardware`. Needs no torch.

- `cost_file`: one table of a file while it is read; units and errors.
- `network`: the tables [link] and [network], with their format.
- `load`: all other tables of a file; names of shipped machines.
"""
