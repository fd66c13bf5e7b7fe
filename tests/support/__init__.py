"""Helpers of the tests, in reading order. Test modules import from here, never from each other.

- Models: `models` (small ones that pipeline splits get wrong), `cases` (with losses and batches), `mesh_models`
  (families of real models), `two_towers` (a loss over the whole batch), `checkpoint_models`, `training` (digits and a
  trainer), `pictures` (JPEGs), `measured` (on the meta device), `zoo_models` (every family of torchvision and many of
  Hugging Face).
- Graphs and costs: `traced` (graphs as text), `graphs` (written by hand), `block_chains` and `cut_problems` (cost
  graphs), `strategy_graphs` and `joint_problems` (shardings), `hardware` (free communication, other networks),
  `machine_points` (as a machine would measure them), `schedules`.
- Plans: `handmade` (cuts that a test gives, run in threads), `ragged` (parts of unequal size), `random_plans`,
  `explained_plans`, `report_pages` (a plan with everything that reports show, and a bench of it).
- Comparisons: `reference` (one device), `parity` (a parallel model with the reference), `rule_cases` and `rule_oracle`.
- Processes: `forks` and `ranks` (how ranks start), `faults` (workers' ids), `symmetric_buffers` (threads as ranks);
  `mesh_worker`, `training_worker`, `random_parity`, `prepared_worker`, `lightning_worker` and
  `hugging_face_worker` are scripts that ranks run.
- Loops that stay as they are, with and without ranks: `prepared_loops`, `lightning_loops`, `hugging_face_loops`.
- The command line: `cli` (in this process), `train_cli` (in its own), `bench`.
- Pages of docs: `measured_steps` (benchmarks), `scale` (tables and pictures), `concepts` (pictures).
- Long runs: `soak` (a script that watches memory, files and threads).
- The test run: `effort` (fast or full), `traces` (cache of traces), `layers` (imports of the package).
"""
