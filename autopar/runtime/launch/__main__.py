"""``python -m autopar.runtime.launch FD FD FD RANK``: a worker process."""

from autopar.runtime.launch.worker import main

main()
