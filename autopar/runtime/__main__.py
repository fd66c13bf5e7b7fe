"""``python -m autopar.runtime FD FD FD RANK``: a worker process."""

from autopar.runtime.worker import main

main()
