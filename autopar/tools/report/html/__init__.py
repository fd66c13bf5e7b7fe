"""How is a plan shown to people who have no autopar? As one HTML file with figures, which opens without a network.

Input: a `ReportInput` with a plan, its simulated step and explanation, and if given a bench of the plan and answers to
"why not". Output: the text of the file. Figures are plotly's, whose script is part of the file; tables are those of the
terminal.

Files in reading order:

- `sections.py`: the report's sections, their texts, tables and figures.
- `measured.py`: the row of a bench that ran the plan.
- `plots.py`: plotly, an extra, and what its figures share; `palette.py`: colours.
- `model_picture.py`, `timeline.py`, `memory.py`, `breakdown.py`, `alternatives.py`: the figures.
- `page.py`: the HTML file; its style sheet and script are `page.css` and `page.js`.
"""
