"""Control messages of 2 to 16,384 ranks: hops, messages, connections, and what all have heard."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from tests.bindings import _C_testing
from tests.distributed.harness import run_ranks

SIZES = [*range(1, 70), 127, 128, 129, 1_000, 1_024, 1_025]
LARGEST = 16_384


def log2_up(size: int) -> int:
    return (size - 1).bit_length()


def deliver(machines: list[_C_testing.Dissemination], rng: random.Random) -> int:
    """Runs all ranks' machines, each hop as soon as its message is there; the number of messages.

    Ranks take their turns in any order, so that some are hops ahead of others.
    """
    on_the_way: dict[tuple[int, int], _C_testing.ControlMessage] = {}
    num_messages = 0

    def send(rank: int) -> None:
        nonlocal num_messages
        machine = machines[rank]
        if not machine.is_done():
            pair = (rank, machine.to(machine.hop()))
            assert pair not in on_the_way, "a pair of ranks has two hops"
            on_the_way[pair] = machine.heard()
            num_messages += 1

    waiting = list(range(len(machines)))
    for rank in waiting:
        send(rank)
    while waiting:
        rng.shuffle(waiting)
        for rank in waiting:
            machine = machines[rank]
            while not machine.is_done() and (
                message := on_the_way.pop((machine.source(machine.hop()), rank), None)
            ):
                machine.hear(message)
                send(rank)
        waiting = [rank for rank in waiting if not machines[rank].is_done()]
    assert not on_the_way
    return num_messages


def message(kind: str, words: list[int]) -> _C_testing.ControlMessage:
    return _C_testing.ControlMessage(getattr(_C_testing.MessageKind, kind), words)


def run(messages: list[_C_testing.ControlMessage]) -> list[_C_testing.ControlMessage]:
    """The message that each rank has in the end; checks the counts."""
    size = len(messages)
    machines = [_C_testing.Dissemination(rank, size, own) for rank, own in enumerate(messages)]
    hops = log2_up(size)
    assert _C_testing.Dissemination.num_hops(size) == hops
    assert deliver(machines, random.Random(size)) == size * hops
    assert all(machine.hop() == hops for machine in machines)
    return [machine.heard() for machine in machines]


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_hears_all_others(size: int) -> None:
    heard = run([message("Pass", [rank, -rank, rank == size // 2]) for rank in range(size)])
    assert all(each.words == [size - 1, 0, 1] for each in heard)


def test_as_many_ranks_as_a_large_job_has() -> None:
    heard = run([message("Pass", [rank, ~rank]) for rank in range(LARGEST)])
    assert all(each.words == [LARGEST - 1, -1] for each in heard)


@pytest.mark.parametrize("size", [*SIZES, LARGEST])
def test_connections_grow_as_the_logarithm(size: int) -> None:
    hops = log2_up(size)
    of = _C_testing.Dissemination.peers
    ranks = range(size) if size <= 1_025 else random.Random(0).sample(range(size), 100)
    for rank in ranks:
        peers = of(rank, size)
        assert len(peers) <= 2 * hops
        assert rank not in peers
        assert all(rank in of(peer, size) for peer in peers)


@pytest.mark.parametrize("size", [*SIZES, 4_096])
def test_ranks_that_wait_for_each_other_connect_in_few_turns(size: int) -> None:
    wanted = []
    for rank in range(size):
        machine = _C_testing.Dissemination(rank, size, message("Pass", []))
        pairs = []
        for hop, sends in _C_testing.Dissemination.connections(rank, size):
            other = machine.to(hop) if sends else machine.source(hop)
            pairs.append((hop, *((rank, other) if sends else (other, rank))))
        wanted.append(pairs[::-1])
    turns = 0
    while any(wanted):
        heads = {pairs[-1] for pairs in wanted if pairs}
        ready = [pair for pair in heads if all(wanted[rank][-1:] == [pair] for rank in pair[1:])]
        assert ready, "the ranks wait for each other in a circle"
        for _, *ranks in ready:
            for rank in ranks:
                wanted[rank].pop()
        turns += 1
    assert turns <= 4 * log2_up(size)


def test_a_flag_of_any_rank_counts() -> None:
    size, count = 13, 200
    flags = [[(rank * 17 + 3) == place for place in range(count)] for rank in range(size)]
    heard = run([_C_testing.ControlMessage.of_flags(each) for each in flags])
    expected = [any(each) for each in zip(*flags, strict=True)]
    assert all(each.flags(count) == expected for each in heard)


def test_a_pass_has_numbers_and_flags() -> None:
    size, count = 13, 100
    messages = [message("Pass", [rank + place for place in range(9)]) for rank in range(size)]
    for rank, each in enumerate(messages):
        each.add_flags([place % size == rank and place < 50 for place in range(count)])
    for each in run(messages):
        assert each.words[:9] == [size - 1 + place for place in range(9)]
        assert each.flags(count, 9) == [place < 50 for place in range(count)]


def test_lists_that_ranks_share_travel_once() -> None:
    size = 37
    lists = [[rank % 3, 5, rank // 36] for rank in range(size)]
    heard = run([message("Lists", [rank, *lists[rank]]) for rank in range(size)])
    expected = [0, *lists[0], 1, *lists[1], 2, *lists[2], 36, *lists[36]]
    assert all(each.words == expected for each in heard)


@pytest.mark.parametrize("odd", [message("Pass", [1, 2, 3]), message("AnyFlags", [1, 2])])
def test_one_rank_with_another_message_is_seen_by_all(odd: _C_testing.ControlMessage) -> None:
    for size in (2, 3, 8, 21):
        heard = run([odd if rank == size // 2 else message("Pass", [1, 2]) for rank in range(size)])
        assert all(each.kind == _C_testing.MessageKind.Different for each in heard)


def learn(pattern: list[int], repeats: int) -> int:
    """Comparisons in the last of the repeats."""
    sequence = _C_testing.KnownSequence()
    asked = 0
    for _ in range(repeats):
        asked = sum(sequence.advance(each) for each in pattern)
    return asked


@pytest.mark.parametrize("pattern", [[1, 2, 3], [1] * 20 + [2], [1] * 40 + [2] + [1] * 30 + [3]])
def test_what_repeats_is_not_compared_for_ever(pattern: list[int]) -> None:
    assert learn(pattern, 1) == len(pattern) or 1 in pattern[1:]
    assert learn(pattern, 16) == 0


def test_another_collective_than_the_known_one_is_compared() -> None:
    sequence = _C_testing.KnownSequence()
    for each in ([1] * 20 + [2]) * 16:
        sequence.advance(each)
    assert sequence.advance(2)


def exchange_words(lengths: list[int]) -> None:
    """Messages that fit into one of fixed size and such that do not, in one order."""
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, length in enumerate(lengths):
        words = [number * 100 + rank] * length
        heard = _C_testing.exchange(backend, message("Collective", words))
        assert heard.words == [number * 100 + size - 1] * length
        lists = _C_testing.exchange(backend, message("Lists", [rank, *[rank % 2] * length]))
        assert lists.words == [0, *[0] * length, 1, *[1] * length]


@pytest.mark.parametrize("world_size", [2, 3])
def test_real_ranks_hear_each_other(world_size: int) -> None:
    run_ranks(exchange_words, world_size, [1, 2, 11, 12, 13, 500, 3, 40])
