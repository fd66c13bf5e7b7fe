"""``python -m autopar.runtime FD RANK``: a worker process."""

from autopar.runtime.worker import main

main()
