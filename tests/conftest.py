"""Settings of the whole suite."""

import torch

# As many as a worker process gets on 2 cores: sums are then ordered alike, and numbers agree to the last bit.
# Parameters whose true gradient is zero (the key bias of attention) would otherwise carry rounding noise through AdamW.
torch.set_num_threads(1)
