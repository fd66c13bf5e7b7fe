"""Loss functions with tensors on another device than the rank's; meta stands for a GPU."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopar.errors import UpdatedStateWarning, UsageError
from autopar.runtime.engine.closure_guard import closure_tensors
from autopar.runtime.engine.loss import moved_to, naming_devices, naming_updates

META, CPU = torch.device("meta"), torch.device("cpu")
GLOBAL = torch.ones(4)


def test_modules_and_partials_are_moved_as_copies() -> None:
    module = nn.CrossEntropyLoss(weight=torch.ones(4))
    part = functools.partial(F.cross_entropy, weight=torch.ones(4), label_smoothing=0.1)
    nested = functools.partial(lambda loss, output, target: loss(output, target), module)
    for loss_fn in (module, part, nested):
        moved = moved_to(loss_fn, META)
        assert moved(torch.empty(2, 4, device="meta"), torch.zeros(2, dtype=torch.long, device="meta")).is_meta
        assert {t.device for t in closure_tensors(moved).values()} == {META}
        assert {t.device for t in closure_tensors(loss_fn).values()} == {CPU}
    assert moved_to(part, META).keywords["label_smoothing"] == 0.1
    assert moved_to(nested, META).args[0] is not module


@pytest.mark.parametrize(
    "loss_fn", [F.cross_entropy, nn.CrossEntropyLoss(weight=GLOBAL), functools.partial(F.cross_entropy, weight=GLOBAL)]
)
def test_what_is_in_its_place_stays_the_users(loss_fn: Any) -> None:
    """A coefficient that the user changes is still seen."""
    assert moved_to(loss_fn, CPU) is loss_fn


class Holder:
    def __init__(self) -> None:
        self.weight, self.unread = torch.ones(4), torch.ones(5)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, self.weight)


def test_tensors_that_a_function_reads() -> None:
    local = nn.Linear(2, 2)
    holder = Holder()
    places = {
        "loss": closure_tensors(holder.loss),
        "closure": closure_tensors(lambda output, target: local(output).mean() + GLOBAL.sum()),
        "module": closure_tensors(nn.Sequential(nn.BatchNorm1d(2, affine=False))),
    }
    assert {name: list(found) for name, found in places.items()} == {
        "loss": ["weight"],
        "closure": ["GLOBAL", "local.weight", "local.bias"],
        "module": ["0.running_mean", "0.running_var", "0.num_batches_tracked"],
    }
    assert places["loss"]["weight"] is holder.weight


def test_an_error_names_tensors_on_other_devices() -> None:
    weight, output, target = torch.ones(4, device="meta"), torch.randn(2, 4), torch.zeros(2, dtype=torch.long)

    def careless(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, weight)

    def careful(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, torch.ones(weight.shape, device=output.device))

    with pytest.raises(UsageError, match=r"loss_fn fails on cpu: .* It reads `weight` on meta\. Pass a module with"):
        naming_devices(careless, CPU)(output, target)
    assert naming_devices(careful, CPU)(output, target).equal(F.cross_entropy(output, target))
    assert naming_devices(F.cross_entropy, CPU) is F.cross_entropy
    with pytest.raises(RuntimeError, match=r"(target dtype to be Long|scalar type)"):  # another error
        naming_devices(careful, CPU)(output, target.int())


class Centred(nn.Module):
    """A loss that subtracts a running mean, a buffer that it updates in place or replaces."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.center, self.scale = nn.Buffer(torch.zeros(4)), nn.Buffer(torch.ones(4))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mean = output.detach().mean(0)
        if self.in_place:
            self.center.lerp_(mean, 0.1)
        else:
            self.center = self.center.lerp(mean, 0.1)
        return F.mse_loss((output - self.center) * self.scale, target)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_with_a_memory_is_warned_of_once(in_place: bool) -> None:
    loss_fn = naming_updates(Centred(in_place))
    output, target = torch.randn(2, 4), torch.randn(2, 4)
    with pytest.warns(UpdatedStateWarning, match=r"loss_fn updates center: for each microbatch.* checkpoints do not"):
        loss_fn(output, target)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_fn(output, target)
        assert naming_updates(nn.CrossEntropyLoss(torch.ones(4)))(output, torch.tensor([1, 2])) > 0
