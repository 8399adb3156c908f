"""Random exports: a model, its options, the moment, and the arguments with what they give."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zerocore
from tests.distributed.random_seeds import world_of
from tests.engine.offloading import ALL, ALL_ON_DISK, STATES

WIDTH = 6
BF16 = torch.bfloat16
CHOICES: dict[str, tuple[Any, ...]] = {
    "face": (0, 1, 2, 3, 3, 3, "fsdp"),
    "units": (None, ["Block"], ["blocks.0", "blocks.1.q_proj", "blocks.1.mix"], []),
    "tied": (False, True),
    "frozen": (None, None, "block", "some", "all but adapters"),
    "adapters": (False, False, True),
    "param_dtype": (None, None, BF16, torch.float16),
    "keep_fp32": (False, True),
    "gather_dtype": (None, None, torch.int8),
    "offload": (None, None, None, STATES, ALL, ALL_ON_DISK),
    "shared_states": (False, True),
    "near": (False, True),
    "optimizer": ("torch", "zerocore"),
    "moment": (
        "new", "stepped", "with gradients", "in no_sync", "before backward", "parked",
        "shown", "inference_mode", "loaded", "averages", "behind one that was left", "in a hook",
        "in a backward", "in a thread",
    ),
    "to": ("all", "all", "one"),
    "dtype": (None, None, BF16, torch.float32, torch.float16),
    "names": (None, "prefix", "some", "few", "fused", "pairs"),
    "merge": (False, True),
    "with_info": (False, True),
    "since": (False, False, True),
}  # fmt: skip
FUSED = {"qkv": ("q_proj", "k_proj", "v_proj")}
Case = dict[str, Any]


def case_of(seed: int, shape: str) -> Case:
    """A combination that ``zerocore`` takes."""
    rng = random.Random(f"export {seed}")
    case = {name: rng.choice(values) for name, values in CHOICES.items()}
    case |= {"seed": seed, "rng": rng, "rank": rng.randrange(world_of(shape))}
    if case["face"] == "fsdp":
        case |= {"offload": None, "units": None, "keep_fp32": False, "optimizer": "torch"}
        case["tied"] = False  # between groups
        if case["moment"] in ("shown", "loaded"):
            case["moment"] = "stepped"
    fit_sharding(case, shape)
    case["merge"] = case["merge"] and case["adapters"]
    if case["names"] == "fused" and case["adapters"]:
        case["names"] = "prefix"
    if case["frozen"] == "all but adapters" and not case["adapters"]:
        case["frozen"] = None
    if case["units"] and len(case["units"]) > 1 and (case["adapters"] or case["names"] == "fused"):
        case["units"] = ["Block"]  # what becomes one tensor is in one unit
    return case


def fit_sharding(case: Case, shape: str) -> None:
    """Takes options out that the stage, the ranks or other options do not go with."""
    least = {None: 0, STATES: 1, ALL: 3, ALL_ON_DISK: 3}
    stage = 0 if case["face"] == "fsdp" else case["face"]
    if stage < least[case["offload"]]:
        case["offload"] = None
    if case["offload"]:
        case["optimizer"] = "zerocore"
    case["near"] = case["near"] and stage == 3 and shape == "4"
    alone = not (case["near"] or case["offload"])
    case["shared_states"] = case["shared_states"] and stage > 0 and shape == "2x2" and alone
    if stage < 3 or case["offload"] in (ALL, ALL_ON_DISK) or case["shared_states"]:
        case["gather_dtype"] = None


class Block(nn.Module):
    """Parameters of several sizes and orders in memory; some are empty on some ranks."""

    def __init__(self, rng: random.Random, is_plain: bool) -> None:
        super().__init__()
        inner = rng.choice([1, 5, 16])
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj = nn.Linear(WIDTH, inner, bias=False)
        self.v_proj = nn.Linear(WIDTH, inner, bias=False)
        self.mix = nn.Linear(inner, WIDTH)
        self.turned = nn.Parameter(torch.randn(WIDTH, 3).t())  # its rows are no memory's
        self.scale = nn.Parameter(torch.ones(()))
        if is_plain:
            self.turned, self.scale = (
                nn.Parameter(torch.randn(3, WIDTH)),
                nn.Parameter(torch.ones(1)),
            )
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        y = self.norm(x.to(self.norm.weight.dtype)).to(x.dtype)
        y = self.mix(torch.tanh(self.k_proj(y)) * self.v_proj(y)) + self.q_proj(y)
        return x + self.scale * y + (x @ self.turned.t()) @ self.turned


class Net(nn.Module):
    """Blocks between an embedding and a head, with frozen numbers and buffers."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        rng = random.Random(f"net {case['seed']}")
        is_plain = case["face"] == "fsdp"  # which refuses others, as FSDP2 does
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block(rng, is_plain) for _ in range(rng.choice([2, 3])))
        self.head = nn.Linear(WIDTH, 7, bias=rng.random() < 0.5)
        self.order = nn.Parameter(torch.arange(5), requires_grad=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("passing", torch.ones(4), persistent=False)
        if case["tied"]:
            self.head.weight = self.embed.weight
        freeze(self, case["frozen"], rng)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x + 0 * self.order.sum())


def freeze(net: Any, which: str | None, rng: random.Random) -> None:
    if which == "block":
        net.blocks[0].requires_grad_(False)
    if which == "some":
        for param in list(net.parameters())[:-1]:
            param.requires_grad_(param.is_floating_point() and rng.random() < 0.6)


def build(case: Case) -> Any:
    torch.manual_seed(case["seed"])
    net = Net(case)
    if case["adapters"]:
        import peft

        # No dtype of its own: PEFT would make adapters float32.
        config = peft.LoraConfig(
            r=2, lora_alpha=3, target_modules=["q_proj", "mix"], init_lora_weights=False
        )
        grads = {name: p.requires_grad for name, p in net.named_parameters()}
        peft.inject_adapter_in_model(config, net)
        if case["frozen"] != "all but adapters":
            for name, p in net.named_parameters():
                p.requires_grad_(grads.get(name.replace(".base_layer", ""), True))
    return net


def as_they_are(full: dict[str, Tensor], rng: random.Random) -> Any:
    return None, full


def prefixed(full: dict[str, Tensor], rng: random.Random) -> Any:
    return (lambda name: f"model.{name}"), {f"model.{n}": v for n, v in full.items()}


def some(full: dict[str, Tensor], rng: random.Random) -> Any:
    left = {name: None for name in full if rng.random() < 0.5}
    if "embed.weight" in left and "head.weight" not in full:
        left["head.weight"] = None  # or it would be given under its other name
    return left, {n: v for n, v in full.items() if n not in left}


def few(full: dict[str, Tensor], rng: random.Random) -> Any:
    kept = rng.sample(sorted(full), 2)
    return (lambda name: name if name in kept else None), {n: full[n] for n in kept}


def fused(full: dict[str, Tensor], rng: random.Random) -> Any:
    whole = {n: v for n, v in full.items() if not any(f"{p}.weight" in n for p in FUSED["qkv"])}
    for name in full:
        if "k_proj.weight" in name and "lora" not in name:
            parts = [full[name.replace("k_proj", p)] for p in FUSED["qkv"]]
            whole[name.replace("k_proj", "qkv")] = torch.cat(parts)
    return zerocore.weights.fused(FUSED), whole


def pairs(full: dict[str, Tensor], rng: random.Random) -> Any:
    """Matrices that become a tensor of one part, behind a name of their own."""
    return (
        lambda name: (f"{name}.whole", 0) if "mix" in name else name,
        {f"{n}.whole" if "mix" in n else n: v for n, v in full.items()},
    )


NAMES: dict[str | None, Callable[..., Any]] = {
    None: as_they_are, "prefix": prefixed, "some": some, "few": few, "fused": fused, "pairs": pairs,
}  # fmt: skip
