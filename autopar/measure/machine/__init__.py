"""``autopar profile``: measures the machine at hand into a cost-model file."""
