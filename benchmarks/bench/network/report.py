"""Makes the table of a slow network: step times, ratios to peers, hidden shares."""

from __future__ import annotations

from statistics import median
from typing import Any

from bench.lib.tables import Table
from bench.network.run import PLAIN

NO_RESHARD = ("FSDP2, no reshard", "FSDP2, no reshard, async")
FSDP2 = ("FSDP2", "FSDP2, async")
NEAR = ("FSDP2, near ranks", "FSDP2, async, near ranks")
# Each system and its peers; the faster peer counts.
PEERS = {
    "zerocore stage 0": ("DDP",),
    "zerocore stage 2": NO_RESHARD,
    "zerocore stage 3": FSDP2,
    "zerocore.fsdp": FSDP2,
    "zerocore stage 3, near ranks": NEAR,
    "zerocore.fsdp, near ranks": NEAR,
}
UNITS = {"mbit": 1e6, "gbit": 1e9}


def bits_per_second(rate: str) -> float:
    """Parses a rate of tc, such as "4gbit"."""
    return float(rate[:-4]) * UNITS[rate[-4:]]


def network_table(title: str, rate: str, found: dict[str, Any]) -> Table:
    """Makes a row for each system; `found` has the times that a rank printed, by label."""
    columns = ["system", "step ms", "of", "peer's", "sent MB", "wire ms", "compute ms"]
    columns += ["hidden %, by length", "by timeline", "floor ms", "floor of peer's"]
    table = Table(title, columns)
    middle = {
        label: {name: median(values) if values else 0.0 for name, values in times.items()}
        for label, times in found.items()
    }
    plain = middle[PLAIN.label]["step_ms"] - middle[PLAIN.label]["update_ms"]
    for label, own in middle.items():
        cells = [label, f"{own['step_ms']:.0f}", *_beside(label, middle, own["step_ms"])]
        if label == PLAIN.label:
            table.add(*cells)
            continue
        wire = own["sent_nbytes"] * 8e3 / bits_per_second(rate)
        compute = plain + own["update_ms"]
        cells += [f"{own['sent_nbytes'] / 1e6:.0f}", f"{wire:.0f}", f"{compute:.0f}"]
        cells.append(_percent(own["step_ms"] - compute, wire))
        if found[label]["wait_ms"]:
            cells.append(_percent(own["wait_ms"], wire))
        if found[label]["floor_ms"]:
            floor = own["floor_ms"] + own["update_ms"]
            cells += [f"{floor:.0f}", *_beside(label, middle, floor)[1:]]
        table.add(*cells)
    return table


def _beside(label: str, middle: dict[str, Any], step_ms: float) -> list[str]:
    """Returns the faster peer, and the ratio of `step_ms` to its step."""
    steps = {peer: middle[peer]["step_ms"] for peer in PEERS.get(label, ()) if peer in middle}
    if not steps:
        return ["", ""]
    peer = min(steps, key=lambda name: steps[name])
    return [peer, f"{step_ms / steps[peer]:.2f}"]


def _percent(exposed: float, wire: float) -> str:
    return f"{100 * (1 - exposed / wire):.0f}"
