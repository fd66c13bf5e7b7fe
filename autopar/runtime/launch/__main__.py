"""``python -m autopar.runtime.launch FD PID FORKS MODULE…``: the fork server of worker processes."""

from autopar.runtime.launch.fork_server import main

main()
