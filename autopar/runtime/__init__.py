"""The fifth stage: programs run as ranks: worker processes, a launcher's processes, or this one."""
