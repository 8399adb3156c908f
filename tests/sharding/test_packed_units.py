"""Frozen parameters of several tensors, as quantized ones, also in units that have no others."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_map_only

import zerocore
from tests.distributed.harness import run_ranks
from zerocore.model.state import state_of

aten = torch.ops.aten
WIDTH = 8


class Packed(Tensor):
    """Rows of int8, each with a scale."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass
        return make(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self._data, self._scale = data, scale

    def __tensor_flatten__(self) -> Any:
        return ["_data", "_scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Any:
        return Packed(inner["_data"], inner["_scale"])

    def unpacked(self) -> Tensor:
        return self._data.float() * self._scale[:, None]

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self._data, self._scale), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: Any, **options: Any) -> Any:
        return Packed(*outputs), outputs

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packed = args[0]
        if func is aten.split.Tensor:
            parts = packed._data.split(args[1]), packed._scale.split(args[1])
            return [Packed(*part) for part in zip(*parts, strict=True)]
        if func is aten.new_zeros.default:
            size = args[1]
            return Packed(packed._data.new_zeros(size), packed._scale.new_zeros(size[0]))
        if func is aten.copy_.default:
            packed._data.copy_(args[1]._data)
            packed._scale.copy_(args[1]._scale)
            return packed
        if func in (aten.detach.default, aten.as_strided.default):
            return Packed(packed._data, packed._scale)
        if func in (aten.clone.default, aten._to_copy.default):
            return Packed(packed._data.clone(), packed._scale.clone())
        values = tree_map_only(Packed, Packed.unpacked, (args, kwargs or {}))
        return func(*values[0], **values[1])


class Layer(nn.Module):
    """A frozen weight, with or without a trained one beside it."""

    def __init__(self, is_trained: bool) -> None:
        super().__init__()
        data = torch.randint(-9, 9, (WIDTH, WIDTH), dtype=torch.int8)
        self.weight = nn.Parameter(Packed(data, torch.rand(WIDTH) / 16), requires_grad=False)
        self.beside = nn.Linear(WIDTH, WIDTH, bias=False) if is_trained else None

    def forward(self, x: Tensor) -> Tensor:
        result = nn.functional.linear(x, self.weight)
        return result if self.beside is None else result + self.beside(x)


def train() -> None:
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Layer(True), Layer(False), Layer(True))
    model: Any = zerocore.shard(copy.deepcopy(plain), units=[Layer])
    assert state_of(model).several() == ["0.weight", "1.weight", "2.weight"]
    assert model[1].weight._data.shape == (WIDTH // 2, WIDTH), "each rank keeps its rows"
    x = torch.randn(4, WIDTH)
    trained = [[param for param in m.parameters() if param.requires_grad] for m in (plain, model)]
    optimizers = [torch.optim.SGD(params, lr=0.1) for params in trained]
    for _ in range(3):
        for network, optimizer in zip((plain, model), optimizers, strict=True):
            network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model(x), plain(x))
    saved = zerocore.full_state_dict(model, rank0_only=False)
    assert torch.equal(saved["1.weight"].unpacked(), plain[1].weight.unpacked())
    model(x).sum().backward()
    with zerocore.reporting.record_events(model) as events:
        model(x).sum().backward()
    moved = [(e.op, e.unit, e.nbytes) for e in events if e.op not in ("unshard", "reshard")]
    assert moved == list(zerocore.planning.predict_events(model))


def train_beside_experts() -> None:
    """Each rank has an expert of its own in the first unit, the same values on both."""
    torch.manual_seed(0)
    plain: Any = nn.Sequential(Layer(True), Layer(False))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
    experts = zerocore.ParameterMesh(mesh["edp"], of=mesh["ep"])
    model: Any = zerocore.shard(
        copy.deepcopy(plain), units=[Layer], groups={"0.beside.weight": experts}
    )
    state = state_of(model)
    units = [([param.fqn for param in unit.params], unit.mesh) for unit in state.units]
    assert units == [([], 0), (["0.beside.weight"], 1), ([], 0)]
    assert state.several() == ["0.weight", "1.weight"]
    x = torch.randn(4, WIDTH)
    loss, expected = model(x).square().mean(), plain(x).square().mean()
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(
        model[0].beside.weight.grad.local(), plain[0].beside.weight.grad.view(-1) / 2
    )


def test_units_of_packed_parameters_alone_are_sharded() -> None:
    run_ranks(train, 2)
    run_ranks(train_beside_experts, 2)
