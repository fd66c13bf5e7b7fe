"""``autopar bench``: a plan run beside the ways in which people train without autopar, on the machine at hand."""
