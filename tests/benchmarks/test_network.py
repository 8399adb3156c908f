"""The table of a slow network: each system beside the faster of its peers."""

from __future__ import annotations

from bench.network.report import bits_per_second, network_table


def times(step_ms: float, wait_ms: list[float], *floor_ms: float) -> dict[str, list[float]]:
    return {
        "step_ms": [step_ms, step_ms + 2, step_ms - 2],
        "update_ms": [10.0],
        "sent_nbytes": [50_000_000],
        "wait_ms": wait_ms,
        "floor_ms": [*floor_ms],
    }


def test_rows_are_beside_the_faster_peer() -> None:
    found = {
        "plain, no communication": times(110, []),
        "FSDP2": times(400, []),
        "FSDP2, async": times(300, []),
        "zerocore stage 3": times(150, [25.0], 110.0),
    }
    rows = network_table("two nodes", "4gbit", found).rows
    assert bits_per_second("500mbit") == 5e8
    assert rows[1][:4] == ["FSDP2", "400", "", ""]
    # 100 ms on the wire and 110 of compute; 40 and 25 of them are exposed.
    # The floor is 110 ms and the update.
    figures = ["50", "100", "110", "60", "75", "120", "0.40"]
    assert rows[3] == ["zerocore stage 3", "150", "FSDP2, async", "0.50", *figures]
