"""Weights to processes that are none of the ranks: here threads of the tests' own process."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks
from tests.distributed.test_export import Stack

Weights = dict[str, Tensor]


class Thread(threading.Thread):
    """Receives some exports, each of which may be left after a number of buckets."""

    def __init__(self, num_exports: int, num_buckets: int | None = None) -> None:
        super().__init__(daemon=True)
        self.receiver = zerocore.Receiver()
        self.num_exports, self.num_buckets = num_exports, num_buckets
        self.exports: list[Weights] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for _ in range(self.num_exports):
                self.exports.append({})
                for number, bucket in enumerate(self.receiver.receive()):
                    if number == self.num_buckets:
                        return
                    self.exports[-1] |= {name: value.clone() for name, value in bucket.items()}
        except ConnectionError as error:
            self.error = error
        finally:
            self.receiver.close()


def send(addresses: list[str], shared: bool) -> list[Weights]:
    """Full weights of each export, of rank 0."""
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    sender = zerocore.Sender(addresses, shared=shared, max_bytes=40_000)
    expected = []
    for number in range(3):
        with zerocore.unsharded(model, write_back=True), torch.no_grad():
            for param in model.parameters():
                param.add_(number)
        sender.send(model, dtype=torch.bfloat16, names=lambda name: f"model.{name}")
        full = zerocore.full_state_dict(model)
        expected.append({f"model.{name}": value.bfloat16() for name, value in full.items()})
    sender.close()
    return expected


@pytest.mark.parametrize("shared", [True, False])
def test_receivers_have_what_is_sent(shared: bool) -> None:
    threads = [Thread(3), Thread(3)]
    sent = run_ranks(send, 2, [thread.receiver.address for thread in threads], shared)[0]
    for thread in threads:
        thread.join(10)
        assert thread.error is None and len(thread.exports) == 3
        for found, expected in zip(thread.exports, sent, strict=True):
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def send_to_the_dead(dying: str, living: str) -> None:
    model = zerocore.shard(Stack(), stage=3, units=["Linear"])
    for address in (dying, "127.0.0.1:1"):
        sender = zerocore.Sender(address, max_bytes=1)
        kind = ConnectionError if dist.get_rank() == 0 else RuntimeError
        with pytest.raises(kind, match=f"receiver of weights at {address}"):
            sender.send(model)
        sender.close()
    model(torch.ones(1, 64))
    again = zerocore.Sender(living)
    again.send(model)
    again.close()


def test_a_receiver_that_dies_is_an_error_on_all_ranks() -> None:
    dying, living = Thread(1, num_buckets=2), Thread(2)
    run_ranks(send_to_the_dead, 3, dying.receiver.address, living.receiver.address)
    living.join(10)
    assert len(living.exports[0]) == 10
    assert living.error is not None  # the second export never began


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        zerocore.Sender("127.0.0.1:1", max_bytes="many")
