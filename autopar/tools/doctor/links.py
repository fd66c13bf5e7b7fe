"""Links between devices: peer access, NVLink, and transfers between each pair, with the cost model's rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from autopar.ir.hardware import Hardware, Link
from autopar.ir.units import BYTES, first_few, plural, text
from autopar.tools.doctor.finding import Finding, Gpu, Probe, Rate, Subject, rate_text
from autopar.tools.doctor.nvidia_smi import SmiError, is_installed, link_rates, output_of, states, topology
from autopar.tools.doctor.transfers import (
    LIMIT_SECONDS,
    MESSAGE_BYTES,
    TRANSPORTS,
    PairTransfers,
    Transfer,
    Transport,
    pair_transfers,
)

MAX_NAMED = 4  # pairs in a line
MAX_FAILED = 3  # pairs, after which no other is tried: each may take its whole time limit
PEER_REMEDY = (
    "In a container share the host's IPC (docker run --ipc=host) and show all GPUs to each process; on PCIe switch off "
    "ACS and the IOMMU (nvidia-smi topo -p2p rw shows what is blocked). Without, NCCL copies through host memory."
)
SLOW_REMEDY = (
    "Look for inactive links (nvidia-smi nvlink --status), PCIe generation and ACS (nvidia-smi topo -m), throttling "
    "and other processes; if this is the machine's rate, measure it for the planner: autopar profile."
)
CPU_REMEDY = (
    "If nothing else uses the machine, this is its rate: measure it for the planner with `autopar profile -o "
    "machine.toml`, and pass --hardware machine.toml."
)
FAILED_REMEDY: dict[Transport, str] = {
    "Gloo": "Ranks cannot agree: look at GLOO_SOCKET_IFNAME and the firewall of the interface that it names.",
    "NCCL": "Run again with NCCL_DEBUG=INFO; look at /dev/shm below 'limits' and try NCCL_P2P_DISABLE=1.",
    "symmetric memory": 'Pass transport="nccl", which needs no peer access; in a container, --ipc=host.',
}


def peer_access(subject: Subject) -> Iterator[Finding]:
    """Finding on which GPUs read and write each other's memory."""
    gpus = subject.gpus[: subject.devices]
    if len(gpus) < 2:
        return
    pairs = list(combinations(gpus, 2))
    without = [f"{a.index}–{b.index}" for a, b in pairs if b.index not in a.peers or a.index not in b.peers]
    if not without:
        yield Finding("links", "peer access (P2P)", "ok", f"all {plural(len(pairs), 'pair')}")
        return
    value = f"not between GPUs {first_few(without, MAX_NAMED)}"
    if subject.comparable is not None and not subject.comparable.peer_access:
        yield Finding("links", "peer access (P2P)", "ok", f"{value}, as the cost model says")
    else:
        yield Finding("links", "peer access (P2P)", "slow", value, PEER_REMEDY)


def nvlink(subject: Subject) -> Iterator[Finding]:
    """Findings on the connection of GPUs, as nvidia-smi names it, and on their NVLinks."""
    gpus = subject.gpus[: subject.devices]
    if len(gpus) < 2 or not is_installed():
        return
    numbers = {state.uuid: state.index for state in states()}
    indices = [numbers[gpu.uuid] for gpu in gpus if gpu.uuid in numbers]
    try:
        connections, rates = topology(output_of("topo", "-m")), link_rates(output_of("nvlink", "--status"))
    except SmiError as error:  # not supported in some virtual machines, where transfers tell the rest
        yield Finding("links", "NVLink", "absent", str(error))
        return
    kinds = Counter(connections[pair] for pair in combinations(sorted(indices), 2) if pair in connections)
    if kinds:
        shown = ", ".join(f"{kind} ({plural(number, 'pair')})" for kind, number in kinds.most_common())
        yield Finding("links", "connection", "ok", shown)
    yield link_finding({index: rates.get(index, ()) for index in indices}, subject.comparable)


def link_finding(rates: Mapping[int, Sequence[float]], hardware: Hardware | None) -> Finding:
    """Finding on NVLinks.

    Args:
        rates: of each GPU's links, byte/s; 0 for one that is inactive.
    """
    active = {index: [rate for rate in links if rate] for index, links in rates.items()}
    most = max((len(links) for links in active.values()), default=0)
    if not most:
        if hardware is not None and "NVLink" in hardware.link_name:
            value = f"none is active, and the cost model {hardware.name} is of {hardware.link_name}"
            remedy = "Start the fabric manager (systemctl start nvidia-fabricmanager), or pass another cost model."
            return Finding("links", "NVLink", "slow", value, remedy)
        return Finding("links", "NVLink", "absent", "none: GPUs are connected by PCIe")
    fewer = [f"GPU {index} has {len(links)}" for index, links in active.items() if len(links) < most]
    value = f"{most} links of {rate_text(max(max(links, default=0.0) for links in active.values()), 'B/s')}"
    if fewer:
        remedy = (
            "A link is down: look at nvidia-smi nvlink --errorcounters and the kernel's log, and restart the machine."
        )
        return Finding("links", "NVLink", "slow", f"{value}, but {first_few(fewer, MAX_NAMED)}", remedy)
    return Finding("links", "NVLink", "ok", f"{value} on each GPU")


def transfers(subject: Subject) -> Iterator[Finding]:
    """Findings on a transfer between each pair of devices, by each transport."""
    pairs = list(combinations(range(subject.devices), 2))
    if not pairs:
        yield Finding("links", "transfers", "absent", "one device sends nothing")
        return
    results: list[PairTransfers] = []
    for pair in pairs:
        results.append(pair_transfers(subject.gpus, pair))
        if sum(bool(result.failed) for result in results) == MAX_FAILED:
            break
    yield from transfer_findings(subject, results)
    if len(results) < len(pairs):
        value = f"{plural(len(pairs) - len(results), 'pair')} not tried, after {MAX_FAILED} that failed"
        yield Finding("links", "transfers", "absent", value)


def transfer_findings(subject: Subject, results: Sequence[PairTransfers]) -> Iterator[Finding]:
    """Findings on the transfers of pairs: by transport, one for each pair that is broken or slow, and one for the rest.

    Rates are compared with the cost model's for the transport that ranks use.
    """
    used = used_transport(subject.gpus[: subject.devices])
    link = subject.comparable.link if subject.comparable is not None else None
    unit, remedy = ("GPUs", SLOW_REMEDY) if subject.gpus else ("processes", CPU_REMEDY)
    for transport in TRANSPORTS:
        one = len(results) == 1
        names = {
            result.pair: transport if one else f"{transport} {result.pair[0]}–{result.pair[1]}" for result in results
        }
        good: list[Rate] = []
        size = f"{text(MESSAGE_BYTES['cpu' if transport == 'Gloo' else subject.device_type], BYTES)} between {unit}"
        for result in results:
            for failure in result.failed:
                if failure.transport == transport:
                    yield Finding("links", names[result.pair], "broken", failure.reason, FAILED_REMEDY[transport])
            for transfer in result.transfers:
                if transfer.transport != transport:
                    continue
                rate = transfer_rate(transfer, link if transport == used else None)
                if rate.is_slow:
                    yield Finding("links", names[result.pair], "slow", f"{rate.text}; {size}", remedy, rate)
                else:
                    good.append(rate)
        if good:
            slowest = min(good, key=lambda rate: rate.measured)
            fastest = rate_text(max(rate.measured for rate in good), "B/s")
            value = slowest.text if one else f"{plural(len(good), 'pair')}, up to {fastest}, at least {slowest.text}"
            yield Finding("links", transport, "ok", f"{value}; {size}", rate=slowest)


def transfer_rate(transfer: Transfer, link: Link | None) -> Rate:
    """Rate of a transfer, and that of a link for a message of its size."""
    predicted = None if link is None else transfer.num_bytes / link.seconds(transfer.num_bytes)
    return Rate(transfer.num_bytes / transfer.seconds, predicted, "B/s")


def used_transport(gpus: Sequence[Gpu]) -> Transport:
    """Transport of tensors between ranks on these GPUs, or on CPU if there are none."""
    if not gpus:
        return "Gloo"
    are_peers = all(b.index in a.peers and a.index in b.peers for a, b in combinations(gpus, 2))
    return "symmetric memory" if are_peers else "NCCL"


PROBES = (
    Probe("links", "peer access (P2P)", peer_access, PEER_REMEDY),
    Probe(
        "links", "NVLink", nvlink, "Run nvidia-smi: if it hangs or fails, load the driver again.", limit_seconds=75.0
    ),
)


def transfer_probe(devices: int) -> Probe:
    """The probe of transfers between so many devices; its time limit grows with the number of pairs."""
    pairs = max(1, devices * (devices - 1) // 2)
    return Probe("links", "transfers", transfers, SLOW_REMEDY, limit_seconds=3 * LIMIT_SECONDS * pairs)
