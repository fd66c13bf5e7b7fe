"""Loopback interface: where processes of one machine meet, out of reach of other machines.

What travels between ranks is neither encrypted nor authenticated, and some of it is unpickled.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import psutil
import torch.distributed as dist

from autopar.errors import SEE_DOCTOR, UsageError

HOST = "127.0.0.1"
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_store() -> dist.TCPStore:
    """Store at a free port of the loopback interface, served by this process while the object lives.

    A TCPStore that opens its port itself listens on all interfaces.
    """
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=os.dup(listener.fileno())
        )


def loopback_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep Gloo and NCCL on the loopback interface, without those that the user has set.

    Raises:
        UsageError: the system names no such interface.
    """
    unset = [name for name in INTERFACE_VARIABLES if not environ.get(name)]
    if not unset:
        return {}
    interfaces = psutil.net_if_addrs()
    for interface, addresses in interfaces.items():
        if HOST in [address.address for address in addresses]:
            return dict.fromkeys(unset, interface)
    raise UsageError(
        f"No network interface of this system has the address {HOST}, where worker processes meet; there are "
        f"{', '.join(interfaces) or 'none'}. Set {' and '.join(unset)} to the one that they shall use. {SEE_DOCTOR}"
    )
