"""Random models, options and moments: an export has the bytes of ``full_state_dict``, whatever its
arguments, and the model trains on."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerocore
import zerocore.fsdp
from tests.distributed.harness import run_ranks
from tests.distributed.random_exports import NAMES, Case, build, case_of
from tests.distributed.random_seeds import (
    SHAPES,
    begin,
    parser_of,
    seeds_of,
    train_all,
    world_of,
)
from tests.weights.test_export import assert_same, exported
from zerocore.model.state import ready_state_of


def sharded(case: Case, net: Any, shape: str) -> Any:
    replicas, _, shards = shape.rpartition("x")
    sizes = (int(replicas), int(shards)) if replicas else (int(shards),)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    if case["face"] == "fsdp":
        policy = zerocore.fsdp.MixedPrecisionPolicy(case["param_dtype"])
        for module in (*net.blocks, net):
            zerocore.fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        return net
    mixed = None
    if case["param_dtype"] or case["gather_dtype"]:
        keep = ("norm", "head") if case["keep_fp32"] and not case["tied"] else ()
        mixed = zerocore.MixedPrecision(
            case["param_dtype"], keep_fp32=keep, gather_dtype=case["gather_dtype"]
        )
    return zerocore.shard(
        net,
        stage=case["face"],
        group=mesh,
        units=case["units"],
        mixed_precision=mixed,
        offload=case["offload"],
        communication=zerocore.Communication(
            regather=2 if case["near"] else None,
            replicas_share="optimizer" if case["shared_states"] else None,
        ),
    )


def loss_of(model: nn.Module, number: int) -> Tensor:
    torch.manual_seed(10 * number + dist.get_rank())
    tokens = torch.randint(7, (3, 4))
    return nn.functional.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())


class Program:
    """Trains the model of a case, and exports it in the case's moment."""

    def __init__(self, case: Case, shape: str) -> None:
        self.case, self.rng = case, case["rng"]
        self.plain = build(case)
        self.model = sharded(case, copy.deepcopy(self.plain), shape)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        make: Any = zerocore.optim.AdamW if case["optimizer"] == "zerocore" else torch.optim.AdamW
        self.optimizer = make(self.trained, lr=1e-2)

    def step(self, number: int) -> None:
        loss_of(self.model, number).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self) -> None:
        if self.case["moment"] != "new":
            self.step(0)
            self.step(1)
        self.at_the_moment(self.case["moment"])
        self.step(2)
        self.check()  # the model goes on

    def at_the_moment(self, moment: str) -> None:
        getattr(self, moment.replace(" ", "_"), self.check)()

    def with_gradients(self) -> None:
        loss_of(self.model, 7).backward()
        self.check()

    def in_no_sync(self) -> None:
        with self.held():
            loss_of(self.model, 7).backward()
            self.check()

    @contextmanager
    def held(self) -> Iterator[None]:
        if self.case["face"] != "fsdp":
            with zerocore.no_sync(self.model):
                yield
            return
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)

    def before_backward(self) -> None:
        loss = loss_of(self.model, 7)
        self.check()
        loss.backward()

    def parked(self) -> None:
        expected = self.expected()
        with zerocore.parked(self.model, self.optimizer):
            self.check(expected)

    def shown(self) -> None:
        expected = self.expected()
        with zerocore.unsharded(self.model):
            self.check(expected)

    def inference_mode(self) -> None:
        with torch.inference_mode():
            loss_of(self.model, 7)
            self.check()
        self.check()

    def loaded(self) -> None:
        full = zerocore.full_state_dict(self.model, rank0_only=False)
        saved = {n: v / 2 if v.is_floating_point() else v + 1 for n, v in full.items()}
        zerocore.load_full_state_dict(self.model, saved)
        self.check()

    def averages(self) -> None:
        ema = zerocore.weights.EMA(self.trained, decay=0.5)
        self.step(5)
        ema.update()
        with ema.swapped():
            self.check()
        self.check()

    def behind_one_that_was_left(self) -> None:
        left = zerocore.export(self.model, max_bytes=self.rng.choice([1, 500]))
        for _ in range(self.rng.randrange(1, 4)):
            next(left, None)
        self.check()
        assert list(left) == []

    def in_a_hook(self) -> None:
        """In the middle of a forward."""
        expected = self.expected()

        def check(*_: Any) -> None:
            own = self.model.state_dict()
            self.check({n: own[n] if "seen" in n else v for n, v in expected.items()})

        hook = self.model.blocks[1].register_forward_hook(check)
        loss = loss_of(self.model, 7)
        hook.remove()
        loss.backward()
        self.optimizer.zero_grad()

    def in_a_backward(self) -> None:
        """In the middle of one."""
        found: list[Tensor] = []
        hook = self.model.blocks[1].register_forward_hook(lambda *_: found.append(_[2]))
        loss = loss_of(self.model, 7)
        hook.remove()
        expected = self.expected()
        found[0].register_hook(lambda _: self.check(expected))
        loss.backward()
        self.optimizer.zero_grad()

    def in_a_thread(self) -> None:
        errors: list[BaseException] = []

        def work() -> None:
            try:
                self.check()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    def expected(self) -> dict[str, Tensor]:
        """All of the state dict in the dtype that layers compute with, tied ones once."""
        if self.case["face"] == "fsdp":
            with torch.inference_mode(mode=False):  # where DTensors are not detached
                state = self.model.state_dict()
            full = {n: getattr(v, "full_tensor", v.clone)().clone() for n, v in state.items()}
        else:
            full = zerocore.full_state_dict(self.model, rank0_only=False)
        for param in ready_state_of(self.model).params():
            full[param.fqn] = full[param.fqn].to(param.types.model)
        if self.case["gather_dtype"]:  # layers compute with what its numbers stand for
            with zerocore.unsharded(self.model):
                full |= {n: p.detach().clone() for n, p in self.model.named_parameters()}
        if self.case["tied"]:
            del full["head.weight"]
        return full

    def check(self, full: dict[str, Tensor] | None = None) -> None:
        """One export, or several of other arguments."""
        full = full or self.expected()
        options, expected = self.arguments(full)
        if self.case["with_info"]:
            info = zerocore.weights.export_info(self.model, **options)
            options = {"info": info}
        for size in (self.rng.randrange(1, 3000), "1GiB"):
            takes = self.case["to"] == "all" or self.case["rank"] == dist.get_rank()
            to = "all" if self.case["to"] == "all" else self.case["rank"]
            found = exported(self.model, max_bytes=size, to=to, **options)
            assert set(found) == (set(expected) if takes else set())
            assert_same(found, expected)
        if self.case["since"]:
            self.check_since(options, expected)

    def check_since(self, options: Any, expected: dict[str, Tensor]) -> None:
        export = zerocore.export(self.model, **options)
        for bucket in export:
            bucket.release()
        again = exported(self.model, since=export.token, **options)
        assert_same(again, expected)
        assert not [name for name in again if "seen" not in name and "steps" not in name]

    def arguments(self, full: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Those of the export, and what it has to give."""
        case, options = self.case, {}
        dtype = case["dtype"]
        if case["merge"]:
            full = self.merged(full)
            options["merge"] = "lora"
        params = {
            name.replace(".base_layer", "") if case["merge"] else name
            for name, p in self.plain.named_parameters() if p.is_floating_point()
        }  # fmt: skip
        cast = {n: v.to(dtype) if dtype and n in params else v for n, v in full.items()}
        options |= {"dtype": dtype} if dtype else {}
        name_of, renamed = NAMES[case["names"]](cast, self.rng)
        options |= {"names": name_of} if name_of else {}
        return options, renamed

    def merged(self, full: dict[str, Tensor]) -> dict[str, Tensor]:
        """As PEFT's own layers merge."""
        model = copy.deepcopy(self.plain)
        for name, param in list(model.named_parameters()):
            owner, _, own = name.rpartition(".")
            if name in full:
                module = model.get_submodule(owner)
                grad = param.requires_grad
                setattr(module, own, nn.Parameter(full[name].clone(), requires_grad=grad))
        found = {}
        for name, value in full.items():
            if ".lora_" not in name:
                found[name.replace(".base_layer", "")] = value
        for name, module in model.named_modules():
            if hasattr(module, "lora_A"):
                base = module.get_base_layer().weight
                found[f"{name}.weight"] = base + module.get_delta_weight("default").to(base.dtype)
        return found


def compare(seeds: range, shape: str) -> None:
    for seed in seeds:
        case = case_of(seed, shape)
        begin(seed, str(case))
        Program(case, shape).run()


@pytest.mark.nightly
@pytest.mark.parametrize("shape", SHAPES)
def test_random_exports_have_the_bytes_of_the_model(shape: str) -> None:
    pytest.importorskip("peft")
    run_ranks(compare, world_of(shape), seeds_of(SHAPES.index(shape), 66), shape, timeout=400)


def main() -> bool:
    """Exports random models and prints the seeds of those that went wrong."""
    options = parser_of(main.__doc__, SHAPES).parse_args()
    return train_all(compare, options, options.shapes)


if __name__ == "__main__":
    sys.exit(not main())
