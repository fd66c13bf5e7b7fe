"""The second stage: an `ir.Graph` and a machine become an `ir.CostGraph`, and an `ir.ChoiceGraph` for sharding."""

from autopar.profile.choices import choice_graph, with_replicas
from autopar.profile.describe import blocks, limits
from autopar.profile.facts import Facts, OpFacts, op_facts
from autopar.profile.fused import compiled_facts
from autopar.profile.holding import Sharing
from autopar.profile.operations import NO_FACTORS, Factors, Measured, factors_of
from autopar.profile.price import price, reweighted
from autopar.profile.segments import segmented, segments

__all__ = [
    "NO_FACTORS", "Factors", "Facts", "Measured", "OpFacts", "Sharing", "blocks", "choice_graph",
    "compiled_facts", "factors_of", "limits", "op_facts", "price", "reweighted", "segmented", "segments",
    "with_replicas",
]  # fmt: skip
