"""Parts of benchmarks/gpu_suite.sh: each group fits the time of one call, and is documented."""

from __future__ import annotations

import re
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_suite.sh"
CALL_SECONDS = 570


def test_each_group_of_parts_fits_a_call() -> None:
    text = SCRIPT.read_text()
    body = text[text.index("run_on_gpu() {") : text.index("rehearse() {")]
    limits: dict[str, dict[str, int]] = {"first": {}}
    for group, name, limit in re.findall(r"^ +(?:group=(\w+)|part (\w+) (\d+) )", body, re.M):
        if group:
            limits[group] = {}
        else:
            limits[list(limits)[-1]][name] = int(limit)
    assert all(0 < sum(of.values()) <= CALL_SECONDS for of in limits.values()), limits
    documented = re.findall(r"^#   (first|second|third|fourth) +(.+)$", text, re.M)
    assert {group: parts.split() for group, parts in documented} == {
        group: list(parts) for group, parts in limits.items()
    }
