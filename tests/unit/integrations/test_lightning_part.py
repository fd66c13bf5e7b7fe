"""Which module of a LightningModule the ranks run."""

from __future__ import annotations

import re

import pytest
from torch import nn

from autopar.errors import UsageError
from autopar.integrations.lightning.part import part_of


class Owner(nn.Module):
    """A module with the children that it is given."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))


def test_the_only_child_with_trained_parameters_is_found_and_replaced() -> None:
    owner = Owner(model=net(), loss=nn.CrossEntropyLoss(), teacher=frozen(net()))
    part = part_of(owner, None)
    assert (part.names, part.module, str(part)) == (("model",), owner.model, "Owner.model")
    instead = nn.ReLU()
    part.put(instead)
    assert owner.model is instead
    with part.left_out(instead):
        assert not any(name.startswith("model") for name in owner.state_dict())
    assert owner.model is instead


def test_a_module_inside_of_another_is_replaced_under_all_its_names() -> None:
    inner = net()
    owner = Owner(task=Owner(net=inner, metric=nn.Identity()), same=inner)
    part = part_of(owner, "task.net")
    assert part.names == ("task.net", "same")
    part.put(instead := nn.ReLU())
    assert owner.get_submodule("task.net") is owner.same is instead


def test_without_trained_parameters_the_child_with_parameters_counts() -> None:
    assert part_of(Owner(model=frozen(net()), metric=nn.Identity()), None).names == ("model",)


INNER = net()
REFUSED = [
    (Owner(), None, "Owner has no parameters. Build its model in __init__ or configure_model."),
    (
        Owner(a=net(), b=nn.Linear(2, 2)),
        None,
        "no child with all 6 trained parameters, as ranks run one: a (4), b (2).",
    ),
    (nn.Linear(2, 2), None, "ranks run one: Linear itself (2). Make one module"),
    (Owner(model=net()), "modle", "Owner has no module 'modle'. Did you mean model? Pass the name of"),
    (Owner(model=net()), "", "Owner has no module ''."),
    (
        Owner(model=net(), head=nn.Linear(2, 2)),
        "model",
        "2 trainable parameters outside of 'model', which the ranks run: head.weight, head.bias.",
    ),
    (
        Owner(model=INNER, first=INNER[0]),  # type: ignore[index]
        None,
        "first.weight, first.bias of Owner lie inside of 'model' too, which the ranks run. Calls of first would",
    ),
]


@pytest.mark.parametrize(("owner", "name", "message"), REFUSED)
def test_what_ranks_cannot_run_alone_is_refused(owner: nn.Module, name: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        part_of(owner, name)
