"""How are results shown? Tables, pictures and Chrome traces of plans, simulations and measurements.

Input: a finished result of `explain`, `simulate`, `parity`, `bench` or `doctor`; nothing is computed here but
texts. Output: rich tables for the terminal, PNG files, HTML pages, and trace events for Perfetto.

Files in reading order:

- `explain_table.py`, `parity_table.py`, `simulate_table.py`, `bench_table.py`, `doctor_table.py`: printed results.
- `figure.py`: matplotlib, an extra, and PNG files.
- `step_bars.py`: bars of a simulated step. `simulation_picture.py`, `bench_picture.py`, `calibration_picture.py`:
  pictures.
- `html/`: a plan as a page with figures.
- `chrome_trace.py`: trace events; `plan_trace.py` of a simulated step, `measured_trace.py` of a measured one.
"""
