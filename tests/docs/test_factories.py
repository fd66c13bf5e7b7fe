"""The package's own tensors do not depend on the caller's default device: `torch.set_default_device` may name a GPU."""

from __future__ import annotations

import ast

import torch
from support.layers import FILES, PACKAGE, room
from torch.utils import _device

FACTORIES = {f"torch.{function.__name__}" for function in _device._device_constructors()}
OWN_PROCESS = {"measure", "tools"}  # run in processes of their own, without a default device


def without_device(source: str) -> list[str]:
    """Calls of torch's factories that leave the device to torch, as ``line: call``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        f"{call.lineno}: {ast.unparse(call)}"
        for call in calls
        if ast.unparse(call.func) in FACTORIES and "device" not in {keyword.arg for keyword in call.keywords}
    ]


def test_factories_without_a_device_are_found() -> None:
    assert {"torch.tensor", "torch.arange", "torch.randperm", "torch.as_tensor"} <= FACTORIES
    found = without_device("a = torch.zeros(\n3)\nb = torch.ones(3, device=d)\nc = a.new_zeros(3)")
    assert found == ["1: torch.zeros(3)"]
    assert torch.Generator not in _device._device_constructors()  # is on the CPU wherever tensors are


def test_factories_name_their_device() -> None:
    found = {p: without_device(p.read_text()) for p in FILES if room(p) not in OWN_PROCESS}
    assert {str(path.relative_to(PACKAGE)): calls for path, calls in found.items() if calls} == {}
