"""How is autopar used from a shell? ``autopar plan | explain | simulate | report | check | train | export | codegen |
bench | profile | doctor``.

Input: arguments, and for ``train`` a TOML file of flags. Output: text, JSON or files, and an exit code. An error is
printed as one readable message. torch is imported only when a command runs.

Files in reading order:

- `app.py`: the list of commands. `command.py`: how a function with flags becomes a command. `process_end.py`: the end.
- `flags.py`, `inputs.py`, `models.py`, `config.py`: flags that commands share, and the values of their texts.
  `early_checks.py`: what is refused before torch is imported.
- `plan.py`, `explain.py`, `simulate.py`, `report.py`, `check.py`, `codegen.py`, `export.py`, `bench.py`,
  `profile.py`, `doctor.py`: commands.
- `train.py`, `train_flags.py`, `unused_flags.py`, `existing_run.py`, `train_run.py`, `verify_weights.py`: ``train``.
- `why_not_args.py`, `replan.py`: from a question or a plan file back to constraints and a model.
- `output.py`, `json_output.py`: printing and writing. `completion.py`: words that a shell offers.
"""
