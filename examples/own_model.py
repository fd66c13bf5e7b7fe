"""A custom model with a skip connection and a custom loss, trained on two devices and compared with one device.

python examples/own_model.py
"""

import functools

import torch
from torch import nn

import autopar


class Denoiser(nn.Module):
    """A small U-shaped network: a skip connection joins the first features to the last layer's input."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, padding=1)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, noisy: torch.Tensor) -> torch.Tensor:
        first = torch.relu(self.enter(noisy))
        deep = torch.relu(self.middle(torch.relu(self.down(first))))
        return noisy + self.leave(torch.cat([torch.relu(self.up(deep)), first], dim=1))


torch.manual_seed(0)
model = Denoiser()
squares = torch.zeros(32, 1, 16, 16)
squares[:, :, 4:12, 4:12] = 1.0
noisy = squares + 0.3 * torch.randn_like(squares)

with autopar.parallelize(
    model,
    devices=2,
    example_inputs=noisy,
    microbatches=4,
    loss_fn=lambda output, target: (output - target).abs().mean(),
    optimizer=functools.partial(torch.optim.AdamW, lr=3e-3),
) as pm:
    print(pm.plan)
    for step in range(30):
        result = pm.train_step(noisy, squares)
        if step % 10 == 0 or step == 29:
            print(f"step {step:2d}: loss {result.loss:.4f}, gradient norm {result.grad_norm:.3f}")
    split = pm.eval()(noisy)
    model.load_state_dict(pm.state_dict())  # back into the unmodified model

alone = model.eval()(noisy)
print(f"largest difference between two devices and one: {(split - alone).abs().max().item():.1e}")
