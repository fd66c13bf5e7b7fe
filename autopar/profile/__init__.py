"""The second stage: an `ir.Graph` and a machine become an `ir.CostGraph`."""

from autopar.profile.facts import Facts, Operand, OpFacts, op_facts
from autopar.profile.price import price

__all__ = ["Facts", "OpFacts", "Operand", "op_facts", "price"]
