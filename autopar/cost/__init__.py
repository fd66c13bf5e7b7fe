"""The second stage: an `ir.Graph` and a machine become an `ir.CostGraph`, and an `ir.StrategyGraph` for sharding."""
