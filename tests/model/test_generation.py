"""Generation with a sharded model gives the tokens of the unsharded one, between training steps."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerocore
from tests.distributed.harness import run_ranks, run_to_end
from tests.distributed.training import adamw, case_named
from tests.zoo_case import Case
from zerocore.model.state import state_of

pytest.importorskip("transformers")

SETTINGS = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def prompt_of(case: Case, seed: int) -> Tensor:
    """Each rank has its own, of its own length."""
    ids: Tensor = case.seeded_batch(seed, dist.get_rank(), 2)["input_ids"]
    return ids[:, : 3 + 2 * dist.get_rank()]


def plain_tokens(model: Any, case: Case, prompt: Tensor, **settings: Any) -> Tensor:
    """The same weights' output on one process; all ranks must call."""
    plain: Any = case.seeded_build()
    plain.load_state_dict(zerocore.full_state_dict(model, rank0_only=False))
    mixed = state_of(model).config.mixed_precision
    for param in plain.parameters() if mixed else []:
        param.data = param.data.to(mixed.param_dtype)  # not buffers: rotary frequencies stay fp32
    tokens: Tensor = plain.eval().generate(prompt, **SETTINGS, **settings)
    return tokens


def train(model: Any, case: Case, optimizer: torch.optim.Optimizer, step: int) -> None:
    model.train()
    case.loss(model, case.seeded_batch(step, dist.get_rank(), 2)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()


def generate_between_steps(stage: int, mixed: zerocore.MixedPrecision | None) -> None:
    for name in ("hf_llama", "hf_gpt2_tied", "hf_t5"):
        # The cache of transformers has no place for a decoder deeper than its encoder.
        without_cache = {"num_beams": 2, "use_cache": False}
        ways = [without_cache] if name == "hf_t5" else [{}, {"num_beams": 2}, without_cache]
        case = case_named(name)
        model: Any = zerocore.shard(case.seeded_build(), stage=stage, mixed_precision=mixed)
        optimizer = adamw(model.parameters())
        for step, way in enumerate(ways):
            print(name, way, flush=True)
            train(model, case, optimizer, step)
            prompt, settings = prompt_of(case, step), {**way, "max_new_tokens": 4}
            tokens = model.generate(prompt, **SETTINGS, **settings)
            assert torch.equal(tokens, plain_tokens(model, case, prompt, **settings))
            assert state_of(model).engine.pool_stats.in_use_nbytes == 0


@pytest.mark.one_by_day
def test_the_same_tokens(stage: int) -> None:
    run_ranks(generate_between_steps, 2, stage, None)


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [0, 3])
def test_the_same_tokens_in_bf16(stage: int) -> None:
    mixed = zerocore.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    run_ranks(generate_between_steps, 2, stage, mixed)


def generate_different_lengths(stage: int, way: str) -> int:
    """The number of gathers that generation took."""
    case = case_named("hf_llama")
    model: Any = zerocore.shard(case.seeded_build(), stage=stage)
    optimizer = adamw(model.parameters())
    for step in range(2):
        train(model, case, optimizer, step)
        prompt, settings = prompt_of(case, step), {"max_new_tokens": 2 + 3 * dist.get_rank()}
        expected = plain_tokens(model, case, prompt, **settings)
        at_hand = zerocore.unsharded(model) if way == "unsharded" else nullcontext()
        synced = {"synced_gpus": True} if way == "synced_gpus" else {}
        with zerocore.reporting.record_events(model) as events, at_hand:
            tokens = model.generate(prompt, **SETTINGS, **settings, **synced)
        assert torch.equal(tokens, expected)
    train(model, case, optimizer, 2)
    return sum(event.op == "all_gather" for event in events)


def test_different_lengths_in_step(stage: int) -> None:
    counts = run_ranks(generate_different_lengths, 2, stage, "synced_gpus")
    # Five units: for each of 5 tokens at stage 3, before, behind the update, at stages 1 and 2.
    assert counts == [25 if stage == 3 else 0] * 2


def test_different_lengths_with_all_parameters_at_hand(stage: int) -> None:
    counts = run_ranks(generate_different_lengths, 2, stage, "unsharded")
    assert counts == [5 if stage == 3 else 0] * 2


@pytest.mark.parametrize("name", ["own", "peft"])
def test_registered_or_wrapped(stage: int, name: str) -> None:
    run_ranks(generate_wrapped, 2, stage, name)


def generate_wrapped(stage: int, name: str) -> None:
    case = case_named("hf_llama")
    model: Any = case.seeded_build()
    if name == "peft":
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model, config)
    settings: dict[str, Any] = {**SETTINGS, "max_new_tokens": 4}
    prompt = case.seeded_batch(0, 0, 2)["input_ids"]
    expected = model.eval().generate(input_ids=prompt, **settings)
    zerocore.shard(model, stage=stage)
    if name == "own":
        zerocore.register_forward_method(model, "generate")
    for step in range(2):
        assert torch.equal(model.generate(input_ids=prompt, **settings), expected)
        case.loss(model, case.seeded_batch(step, dist.get_rank(), 2)).backward()
        model.zero_grad()
    assert state_of(model).engine.pool_stats.in_use_nbytes == 0


def diverge() -> None:
    case = case_named("hf_llama")
    model: Any = zerocore.shard(case.seeded_build())
    model.generate(prompt_of(case, 0), **SETTINGS, max_new_tokens=2 + 3 * dist.get_rank())
    dist.barrier()


def test_different_lengths_out_of_step_end_with_an_error() -> None:
    """Not in silence; which error it is depends on the backend."""
    outcomes = run_to_end(diverge, 2, timeout=60, group_timeout=5)
    assert any(outcome.error is not None for outcome in outcomes)
    assert all("did not end" not in (outcome.error or "") for outcome in outcomes)
