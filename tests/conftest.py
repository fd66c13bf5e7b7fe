"""Settings of the whole suite."""

import os

import torch
from hypothesis import settings

# As many as a worker process gets on 2 cores: sums are then ordered alike, and numbers agree to the last bit.
# Parameters whose true gradient is zero (the key bias of attention) would otherwise carry rounding noise through AdamW.
torch.set_num_threads(1)

# New examples at every run find more; a change is judged by the same ones each time.
settings.register_profile("CI", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("CI")
