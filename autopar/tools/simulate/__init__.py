"""When does each rank run which action of a planned step, and how much memory does it use meanwhile?

Input: a `Plan`, and optionally another schedule that its stages allow; no model and no device. Output: a
`SimulatedStep` with the timeline, transfers, and a `MemoryCurve` per pipeline position.

Files in reading order:

- `step.py`: the simulated step; the timeline is `autopar.schedule.simulate`'s.

`tools/report/` prints the step as a table, draws it, and writes it as a Chrome trace.
"""
