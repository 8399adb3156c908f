"""zerocore.Checkpoints of models of ``zerocore.fsdp``: loaded by either face, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import zerocore
import zerocore.fsdp
from tests.by_night import by_night
from tests.distributed.harness import run_ranks
from tests.fsdp.both import Net, loss_of, make_net, shard_blocks, tokens_of

OPTIMIZERS: dict[str, Any] = {
    "zerocore": lambda params: zerocore.optim.AdamW(params, lr=1e-2),
    "torch": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
NARROW = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def last_dim(param: nn.Parameter) -> Shard | None:
    even = param.dim() > 1 and param.shape[1] % dist.get_world_size() == 0
    return Shard(1) if even else None


class Training:
    """A model of one face, its optimizer and checkpoints."""

    def __init__(self, folder: Path, face: str, name: str, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        net = Net()
        net.register_buffer("seen", torch.zeros(2))
        self.model: Any = (
            shard_blocks(zerocore.fsdp, net, **options) if face == "fsdp" else zerocore.shard(net)
        )
        self.optimizer = OPTIMIZERS[name](self.model.parameters())
        self.checkpoints = zerocore.Checkpoints(folder, self.model, self.optimizer)

    def run(self, *steps: int) -> list[float]:
        losses = []
        for index in steps:
            torch.manual_seed(index)  # the same on all ranks: any number of them trains alike
            loss = loss_of(self.model, torch.randint(0, 7, (4, 5)))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.model.seen += 1
            losses.append(loss.item())
        return losses

    def values(self) -> dict[str, Tensor]:
        named = dict(self.model.named_parameters())
        return {name: param.full_tensor().detach() for name, param in named.items()}


def save(folder: Path, face: str, name: str, options: dict[str, Any]) -> Any:
    training = Training(folder, face, name, 0, **options)
    assert training.checkpoints.load() is None
    training.run(0, 1)
    training.checkpoints.save(2).wait()
    losses = training.run(2, 3)
    return losses, training.values()


def load(folder: Path, face: str, name: str, options: dict[str, Any], expected: Any) -> None:
    training = Training(folder, face, name, 1, **options)
    assert training.checkpoints.load() == 2
    assert training.model.seen.tolist() == [2, 2]
    torch.testing.assert_close(training.run(2, 3), expected[0], rtol=1e-5, atol=1e-6)
    for key, value in training.values().items():
        torch.testing.assert_close(value, expected[1][key], rtol=1e-5, atol=1e-6)


CASES = (
    ("fsdp", 2, "fsdp", 2, "zerocore"),
    ("fsdp", 2, "fsdp", 4, "zerocore"),
    ("fsdp", 3, "shard", 2, "zerocore"),
    ("shard", 2, "fsdp", 3, "zerocore"),
    ("fsdp", 4, "shard", 1, "torch"),
    ("shard", 1, "fsdp", 2, "sgd"),
)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("face", "ranks", "other", "other_ranks", "name"), [*by_night(*CASES[::2]), *CASES[1::2]]
)
def test_training_goes_on(
    tmp_path: Path, face: str, ranks: int, other: str, other_ranks: int, name: str
) -> None:
    expected = run_ranks(save, ranks, tmp_path, face, name, {})[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "default")
        run_ranks(load, other_ranks, tmp_path, other, name, {}, expected)


def save_and_load_everywhere(folder: Path, options: dict[str, Any]) -> None:
    """Into a model with the same options, into one without, and into the other face's."""
    expected = save(folder, "fsdp", "zerocore", options)
    load(folder, "fsdp", "zerocore", options, expected)
    load(folder, "fsdp", "zerocore", {}, expected)
    load(folder, "shard", "zerocore", {}, expected)


def cut_in_the_last_dim(folder: Path) -> None:
    save_and_load_everywhere(folder, {"shard_placement_fn": last_dim})


@pytest.mark.nightly
def test_rows_of_another_dimension(tmp_path: Path) -> None:
    run_ranks(cut_in_the_last_dim, 2, tmp_path)


def save_over_replicas(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    save_and_load_everywhere(folder, {"mesh": mesh})


@pytest.mark.nightly
def test_replicas(tmp_path: Path) -> None:
    run_ranks(save_over_replicas, 4, tmp_path)


def save_main_weights(folder: Path) -> None:
    training = Training(folder, "fsdp", "zerocore", 0, mp_policy=NARROW)
    training.run(0, 1, 2)
    training.checkpoints.save(2).wait()
    before = training.values()
    training.run(3)
    training.model.to("cpu")  # the engine is made anew
    assert training.checkpoints.load() == 2
    for key, value in training.values().items():
        assert value.dtype == torch.float32 and torch.equal(value, before[key])
    training.model.blocks[0].unshard()
    shown = training.model.blocks[0].qkv.weight
    assert torch.equal(shown, before["blocks.0.qkv.weight"].to(torch.bfloat16))


def test_main_weights_and_a_new_engine(tmp_path: Path) -> None:
    run_ranks(save_main_weights, 2, tmp_path)


def read_with_torch(folder: Path) -> None:
    training = Training(folder, "fsdp", "torch", 0)
    training.run(0)
    training.checkpoints.save(2).wait()
    twin = shard_blocks(torch.distributed.fsdp, make_net())
    state = {f"model.{key}": value for key, value in twin.state_dict().items()}
    dcp.load(state, checkpoint_id=folder / "step-00000002")
    for key, value in training.values().items():
        found = state[f"model.{key}"]
        assert isinstance(found, DTensor) and torch.equal(found.full_tensor(), value)
    loss_of(training.model, tokens_of(0))


def test_fsdp2_reads_it(tmp_path: Path) -> None:
    run_ranks(read_with_torch, 2, tmp_path)


def refuse_tensor_parallelism(folder: Path) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    zerocore.fsdp.fully_shard(model, mesh=mesh["dp"])
    checkpoints = zerocore.Checkpoints(folder, model)
    with pytest.raises(ValueError, match=r"'0\.weight' is sharded over several mesh dimensions"):
        checkpoints.save(1)


def test_tensor_parallelism_is_refused(tmp_path: Path) -> None:
    run_ranks(refuse_tensor_parallelism, 4, tmp_path)
