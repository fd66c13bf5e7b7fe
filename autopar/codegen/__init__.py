"""The fourth stage: a graph and a plan become one program per stage, runnable as an fx.GraphModule and printable."""

from autopar.codegen.module import graph_module, source
from autopar.codegen.regions import regions_of
from autopar.codegen.split import follow, holders, split

__all__ = ["follow", "graph_module", "holders", "regions_of", "source", "split"]
