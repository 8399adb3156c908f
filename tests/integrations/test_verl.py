"""verl's own engine over a sharded model, as far as a CPU goes: its data path asks for a device."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.harness import run_ranks

sys.path.append(str(Path(sys.prefix) / "alone"))  # where scripts/setup_env.py installs verl
pytest.importorskip("verl", reason="make test installs it, without its requirements")
transformers = pytest.importorskip("transformers")


def build_module(adapted: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    module = transformers.Qwen3ForCausalLM(config)
    if not adapted:
        return module
    import peft

    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    return peft.get_peft_model(module, lora)


def make(adapted: bool = False, merges: bool = False, **options: Any) -> Any:
    """An engine from the registry, of a model that is made here and not in a folder."""
    from verl.plugin.platform import set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig
    from verl.workers.engine.base import EngineRegistry

    import zerocore.integrations.verl

    class OnTheHost(PlatformCUDA):
        device_name = "cpu"
        vendor_name = "cpu"
        device_module = SimpleNamespace(
            mem_get_info=lambda: (0, 0),
            memory_allocated=lambda: 0,
            memory_reserved=lambda: 0,
            empty_cache=lambda: None,
        )

    set_platform(OnTheHost())
    kind = EngineRegistry.get_engine_cls("language_model", zerocore.integrations.verl.BACKEND)
    model = SimpleNamespace(use_remove_padding=False, lora_rank=0, lora={"merge": merges})
    optimizer = FSDPOptimizerConfig(lr=1e-2, total_training_steps=10, clip_grad=1.0)
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    engine_config = FSDPEngineConfig(
        strategy="fsdp", use_torch_compile=False, **{"mixed_precision": fp32, **options}
    )
    engine: Any = kind(model, engine_config, optimizer, None)
    engine._build_module = lambda: build_module(adapted)
    engine.initialize()
    return engine


def step(engine: Any, number: int) -> None:
    tokens = torch.arange(8).view(2, 4) + number + dist.get_rank()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        for is_last in (False, True):
            with engine._gradient_sync_context(is_last_micro_batch=is_last):
                engine.module(input_ids=tokens, labels=tokens).loss.backward()
        assert engine.optimizer_step() > 0
        engine.lr_scheduler_step()


def tensors_of(engine: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Any]:
    found, config = engine.get_per_tensor_param(**options)
    return {name: value.clone() for name, value in found}, config


def train(folder: str) -> None:
    engine, parking = make(), make()
    for number in range(2):
        step(engine, number)
        step(parking, number)
    for name in ("get_per_tensor_param_shard", "get_per_tensor_param_delta_shard"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            getattr(engine, name)()
    parking.to("cpu")
    expected, config = tensors_of(engine)
    assert config is None and "model.layers.0.self_attn.q_proj.weight" in expected
    assert set(expected) == set(build_module(False).state_dict()) - {"lm_head.weight"}
    found, _ = tensors_of(parking)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    with pytest.raises(RuntimeError, match="is parked"):
        parking.module(input_ids=torch.zeros(1, 2, dtype=torch.long))
    parking.to("cuda")  # any device but the host
    with parking.eval_mode(), torch.no_grad():
        parking.module(input_ids=torch.zeros(1, 2, dtype=torch.long))
    engine.save_checkpoint(folder, global_step=2)
    step(engine, 2)
    last, _ = tensors_of(engine)
    engine.load_checkpoint(folder)
    again, _ = tensors_of(engine)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    step(engine, 2)
    again, _ = tensors_of(engine)
    assert all(torch.equal(again[name], last[name]) for name in expected)


def test_training_exports_and_checkpoints(tmp_path: Path) -> None:
    run_ranks(train, 2, str(tmp_path), timeout=200)


def adapt() -> None:
    merged, config = tensors_of(make(adapted=True, merges=True))
    expected = build_module(True).merge_and_unload().state_dict()
    assert config is None
    assert all(torch.equal(merged[name], expected[name]) for name in merged)
    assert len(merged) == len(expected) - 1  # the head is tied
    apart, config = tensors_of(make(adapted=True), base_sync_done=True)
    assert config.r == 2 and len(apart) == 4 and all("lora_" in name for name in apart)


def test_adapters() -> None:
    run_ranks(adapt, 2, timeout=200)
