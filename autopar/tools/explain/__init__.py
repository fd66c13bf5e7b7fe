"""Why a plan is as fast as it is, why not another one, and what is different between two."""
