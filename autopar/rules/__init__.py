"""Sharding rules: what of an operation can be split over ranks, as one line of text or a function of its shapes."""

from autopar.rules.assign import unruled
from autopar.rules.find import rule_of
from autopar.rules.local import localised
from autopar.rules.rule import REPLICATE, Rule, Strategy, by_operand, by_output, replicate, strategies, strategy
from autopar.rules.table import RULES

__all__ = [
    "REPLICATE", "RULES", "Rule", "Strategy", "by_operand", "by_output", "localised", "replicate", "rule_of",
    "strategies", "strategy", "unruled",
]  # fmt: skip
