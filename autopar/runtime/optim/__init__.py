"""Optimizer step on a rank: an optimizer for parts of the model, gradient reduction, clipping, loss scaling, EMA.

Question: how does any optimizer of the user's update weights that are split over ranks as it would on one device?
Input: a `RankSpec` with the user's callables (optimizer, lr_scheduler, ema), the rank's trainable weights, a transport.
Output: an `Updater`, whose ``step()`` returns an `UpdateResult` (global gradient norm, skipped or not).

Optimizers are probed on small parameters instead of being looked up in a list of names or types: hooks count too.

Files in reading order: probe (does an optimizer need whole parameters, or all of them?), build (the rank's optimizer),
state_bytes (bytes of optimizer state per element, for the planner), lr_scheduler, loss_scaler (float16), step (the
optimizer step itself), ema (moving averages of weights).
"""
