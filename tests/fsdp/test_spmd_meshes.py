"""``dp_mesh_dims``: parameters on the mesh of all parallelisms, as DTensors or annotated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.fsdp.both import ENGINES, Trained, check_same, full_params, train, train_both
from tests.fsdp.test_placements import make_layers

dims = getattr(torch_fsdp, "DataParallelMeshDims", None)
pytestmark = pytest.mark.skipif(dims is None, reason="this torch has no dp_mesh_dims")

MESHES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "fsdp": (("dp", "tp"), {"shard": "dp"}),
    "cp": (("dp", "cp"), {"shard": ("dp", "cp")}),
    "hsdp": (("rep", "dp"), {"shard": "dp", "replicate": "rep"}),
    "tp first": (("tp", "dp"), {"shard": "dp"}),
}


def train_dtensors(names: tuple[str, ...], named: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    kinds = {"tp": Replicate(), "dp": Shard(0), "rep": Shard(0), "cp": Shard(1)}
    inputs = [kinds[name] for name in names]

    def distribute(model: nn.Module) -> None:
        for pair in model.pairs:  # type: ignore[union-attr]
            for index, dim in ((0, 0), (2, 1)):
                layer = pair[index]
                for key, param in list(layer.named_parameters()):
                    cut = Shard(dim) if key == "weight" or index == 0 else Replicate()
                    placed = [cut if name == "tp" else Replicate() for name in names]
                    layer._parameters[key] = nn.Parameter(
                        DTensor.from_local(_part(param, mesh, placed), mesh, placed)
                    )

    def step(model: nn.Module, index: int) -> float:
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(index))
        loss = model(DTensor.from_local(x, mesh, inputs)).square().mean()
        loss.backward()
        return loss.full_tensor().item()

    def run(fsdp: Any, model: Any) -> Trained:
        distribute(model)
        for module in (*model.pairs, model):
            fsdp.fully_shard(module, mesh=mesh, dp_mesh_dims=dims(**named))
        trained = train(model, step)
        placed = {name: (p.placements, p.device_mesh) for name, p in model.named_parameters()}
        found.append({name: (tuple(map(str, p)), m.shape) for name, (p, m) in placed.items()})
        return trained

    found: list[Any] = []
    check_same(train_both(run, make_layers))
    assert found[0] == found[1]


def _part(param: Tensor, mesh: Any, placements: Any) -> Tensor:
    local = param.detach()
    for index, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.chunk(mesh.size(index), placement.dim)[mesh.get_local_rank(index)]
    return local.contiguous()


@pytest.mark.parametrize("case", [*by_night("fsdp", "hsdp", "cp"), "tp first"])
def test_dtensors_train_as_with_fsdp2(case: str) -> None:
    run_ranks(train_dtensors, 4, *MESHES[case])


class Halves(nn.Module):
    """Two ranks of "tp" have a half of ``up`` and ``down`` each, and all of ``norm``."""

    def __init__(self, whole: dict[str, Tensor], rank: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(whole["norm"].clone())
        self.up = nn.Parameter(whole["up"].chunk(2, 0)[rank].clone())
        self.down = nn.Parameter(whole["down"].chunk(2, 1)[rank].contiguous())

    def forward(self, x: Tensor) -> Tensor:
        assert type(self.up) is not DTensor
        return torch.tanh(x * self.norm @ self.up.t()) @ self.down.t()


def train_annotated(hybrid: bool) -> None:
    """Beside one process that has the whole parameters."""
    spmd = pytest.importorskip("spmd_types")
    from torch.distributed import _functional_collectives as functional

    names = ("rep", "dp", "tp") if hybrid else ("dp", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2)[: len(names)], mesh_dim_names=names)
    torch.manual_seed(0)
    whole = {"norm": torch.rand(8), "up": torch.randn(12, 8), "down": torch.randn(8, 12)}
    model: Any = Halves(whole, mesh.get_local_rank("tp"))
    kinds = {"norm": spmd.R, "up": spmd.S(0), "down": spmd.S(1)}
    with spmd.set_current_mesh(mesh):
        for name, param in model.named_parameters():
            rest = dict.fromkeys(names[:-1], spmd.R)
            spmd.assert_type(param, {**rest, "tp": kinds[name]})
    named = {"shard": "dp", **({"replicate": "rep"} if hybrid else {})}
    ENGINES["zerocore"].fully_shard(model, mesh=mesh, dp_mesh_dims=dims(**named))
    truth = {name: nn.Parameter(value.clone()) for name, value in whole.items()}
    ours, theirs = (
        torch.optim.AdamW(params, lr=1e-2, foreach=False)
        for params in (model.parameters(), truth.values())
    )
    num_data = mesh.size() // 2
    own = mesh.get_rank() // 2
    for index in range(3):
        x = torch.randn(num_data, 3, 8, generator=torch.Generator().manual_seed(index))
        parts = model(x[own])
        total = functional.all_reduce(parts.detach(), "sum", mesh.get_group("tp"))
        (parts * (2 * total)).sum().backward()
        hidden = torch.tanh(x * truth["norm"] @ truth["up"].t())
        ((hidden @ truth["down"].t()).square().sum() / num_data).backward()
        for name, param in model.named_parameters():
            grad = param.grad.full_tensor()
            torch.testing.assert_close(grad, truth[name].grad, rtol=1e-5, atol=1e-5)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    for name, value in full_params(model).items():
        torch.testing.assert_close(value, truth[name].detach(), rtol=1e-5, atol=1e-5)
    assert spmd.get_local_type(model.up) == {}  # rows are DTensors
    model.unshard()
    assert spmd.get_local_type(model.up)[spmd.MeshAxis.of(mesh.get_group("tp"))] is spmd.V


@pytest.mark.parametrize("hybrid", [*by_night(False), True])
def test_annotated_parameters_train_as_one_process(hybrid: bool) -> None:
    pytest.importorskip("spmd_types")
    run_ranks(train_annotated, 8 if hybrid else 4, hybrid)


def refuse() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard = ENGINES["zerocore"].fully_shard
    layer = nn.Linear(4, 4, bias=False)
    with pytest.raises(ValueError, match="Mesh dim name 'ep' not found"):
        shard(layer, mesh=mesh, dp_mesh_dims=dims(shard="ep"))
    with pytest.raises(NotImplementedError, match="a mesh dimension to shard over"):
        shard(layer, mesh=mesh, dp_mesh_dims=dims(replicate="dp"))
    with pytest.raises(ValueError, match="Got plain tensor for parameter 'weight'"):
        shard(layer, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    cut = copy.deepcopy(layer)
    cut.weight = nn.Parameter(DTensor.from_local(layer.weight, mesh, [Shard(0), Replicate()]))
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'dp'"):
        shard(cut, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
    with pytest.raises(ValueError, match="the same mesh passed to fully_shard"):
        shard(
            cut,
            mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)),
            dp_mesh_dims=dims(shard="dp"),
        )
    assert type(layer) is nn.Linear


def refuse_annotations() -> None:
    spmd = pytest.importorskip("spmd_types")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    shard = ENGINES["zerocore"].fully_shard
    cases = [
        ({"dp": spmd.R, "tp": spmd.V}, "plain Varying"),
        ({"dp": spmd.I, "tp": spmd.R}, "expected spmd.R, because"),
        ({"dp": spmd.R}, "are missing"),
    ]
    for kinds, message in cases:
        layer = nn.Linear(4, 4, bias=False)
        with spmd.set_current_mesh(mesh):
            spmd.assert_type(layer.weight, kinds)
        with pytest.raises(ValueError, match=message):
            shard(layer, mesh=mesh, dp_mesh_dims=dims(shard="dp"))
        with pytest.raises(ValueError, match="pass the mesh of all parallelisms"):
            shard(layer, mesh=mesh["dp"])
    layer = nn.Linear(4, 4, bias=False)
    with spmd.set_current_mesh(mesh):
        spmd.assert_type(layer.weight, {"dp": spmd.R, "tp": spmd.R})
    with pytest.raises(ValueError, match="which is neither a dimension of"):
        shard(layer, mesh=mesh["dp",], dp_mesh_dims=dims(shard="dp"))


def test_what_is_refused() -> None:
    run_ranks(refuse, 4)


def test_which_annotations_are_refused() -> None:
    pytest.importorskip("spmd_types")
    run_ranks(refuse_annotations, 4)
