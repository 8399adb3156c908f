"""Activations measured on fake tensors: equal to those of a real run, and to formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.zoo import CASES
from zerocore.model.units import choose_units
from zerocore.planning.activations import default_loss, record

WIDTH, ROWS, NUM_BLOCKS = 32, 100, 6
ROW_NBYTES = ROWS * WIDTH * 4


class Chain(nn.Module):
    """Each block saves the input of its layer and the output of its tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_BLOCKS)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_a_chain_saves_one_tensor_for_each_block() -> None:
    """A tanh's output is the next layer's input: one storage. The model's input is not counted."""
    model = Chain()
    run = record(model, choose_units(model, None), torch.randn(ROWS, WIDTH), default_loss)
    assert run.saved_nbytes == NUM_BLOCKS * ROW_NBYTES
    assert run.peak_moment >= len(run.order)  # in the backward


def test_checkpointing_keeps_the_inputs_of_the_blocks() -> None:
    model = Chain()
    batch, planned = torch.randn(ROWS, WIDTH), choose_units(model, None)
    plain = record(model, planned, batch, default_loss)
    checkpointed = record(model, planned, batch, default_loss, checkpointing=True)
    assert checkpointed.saved_nbytes == (NUM_BLOCKS - 1) * ROW_NBYTES
    assert [(e.enter, e.unit) for e in checkpointed.order] == [
        (e.enter, e.unit) for e in plain.order
    ]
    forward = sum(plain.flops[: len(plain.order)])
    assert checkpointed.total_flops == plain.total_flops + forward


def test_checkpointing_recomputes_blocks_and_not_what_is_around_them() -> None:
    """A list of blocks in a module with a parameter of its own, which is a unit, too."""
    model = nn.Sequential(Chain(), nn.Linear(WIDTH, 1))
    model[0].bias = nn.Parameter(torch.zeros(WIDTH))
    planned = choose_units(model, None)
    assert [unit.name for unit in planned][:2] == ["0", "0.blocks.0"]
    batch = torch.randn(ROWS, WIDTH)
    run = record(model, planned, batch, default_loss, checkpointing=True)
    assert run.saved_nbytes == NUM_BLOCKS * ROW_NBYTES  # inputs of blocks but one, and of the head


def test_operations_of_matrix_products() -> None:
    """2 operations a weight and row in the forward, 4 in the backward less the first layer's
    input, which needs no gradient."""
    model = Chain()
    run = record(model, choose_units(model, None), torch.randn(ROWS, WIDTH), default_loss)
    product = 2 * ROWS * WIDTH * WIDTH
    assert run.total_flops == (3 * NUM_BLOCKS - 1) * product
    forward = sum(run.flops[: len(run.order)])
    assert forward == NUM_BLOCKS * product


def test_dtype_halves_the_bytes() -> None:
    model = Chain()
    planned, batch = choose_units(model, None), torch.randn(ROWS, WIDTH)
    wide = record(model, planned, batch, default_loss)
    narrow = record(model, planned, batch, default_loss, dtype=torch.bfloat16)
    assert 2 * narrow.saved_nbytes == wide.saved_nbytes


def saved_by_a_real_run(name: str) -> int:
    """Bytes of the storages that autograd saves, each once, without parameters and inputs."""
    case = CASES[name]
    model, batch = case.seeded_build(), case.seeded_batch(0, 0, 3)
    known = [*model.parameters(), *model.buffers()]
    known += [value for value in batch.values() if isinstance(value, Tensor)]
    ignored = {tensor.untyped_storage().data_ptr() for tensor in known}
    saved: dict[int, int] = {}
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            kept.append(tensor)  # so that no address is used twice
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.loss(model, batch)
    return sum(saved.values())


@pytest.mark.parametrize(
    "name", ["plain", "looped", "nested_units", "tied", "frozen", "structured", "encoder_decoder"]
)
def test_fake_tensors_save_what_a_real_run_saves(name: str) -> None:
    case = CASES[name]
    model = case.seeded_build()
    planned = choose_units(model, case.units)
    run = record(model, planned, case.seeded_batch(0, 0, 3), case.loss)
    assert run.saved_nbytes == saved_by_a_real_run(name)


def test_attention_is_counted_as_a_fused_kernel() -> None:
    """Query, key, value, output and one fp32 number a row are saved; no square of the length."""
    batch, heads, length, head = 2, 4, 128, 16

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3, 1, 1, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (self.scale * x).clone().unbind()
            mask = torch.ones(length, length, dtype=torch.bool).tril()
            return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    model = Attention()
    rows = torch.randn(3, batch, heads, length, head)
    run = record(model, choose_units(model, None), rows, default_loss)
    tensor = batch * heads * length * head * 4
    few = 64  # the state of the random generator
    assert 0 <= run.saved_nbytes - (4 * tensor + batch * heads * length * 4) <= few


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 3, 5, 8)])
def test_attention_of_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    class Attention(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return nn.functional.scaled_dot_product_attention(y, y, y)

    model = Attention(8, 8)
    run = record(model, choose_units(model, None), torch.randn(shape), default_loss)
    assert run.unused == ((),)


def test_a_learned_bias_gets_its_gradient() -> None:
    """Fused kernels would leave it out."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(5, 5))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x, self.bias)

    model = Attention()
    run = record(model, choose_units(model, None), torch.randn(1, 1, 5, 8), default_loss)
    assert run.unused == ((),)
