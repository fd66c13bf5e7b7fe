"""The fourth stage: a graph and a plan become one program per stage, runnable as an fx.GraphModule and printable."""
