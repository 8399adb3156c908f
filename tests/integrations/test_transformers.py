"""Hugging Face's Trainer over a sharded model does what it does over DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zerocore
from tests.distributed.harness import run_ranks
from tests.integrations.language_model import TRAINER_OPTIONS, build_model, samples
from zerocore.model.state import state_of

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

STEPS = 6
SAVED = 4  # the checkpoint that training is resumed from


def arguments(folder: Path, **changes: Any) -> Any:
    """TRAINER_OPTIONS as the trainer takes them."""
    from transformers import TrainingArguments

    options = {**TRAINER_OPTIONS, "output_dir": str(folder), "max_steps": STEPS, **changes}
    return TrainingArguments(**options)


def make_trainer(
    folder: Path, stage: int | None, options: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """A trainer over zerocore, or over DDP where there is no stage."""
    import transformers

    from zerocore.integrations.transformers import Trainer

    data = {"train_dataset": samples(32), "eval_dataset": samples(6, seed=2)}
    args = arguments(folder, **changes)
    if stage is None:
        return transformers.Trainer(build_model(), args, **data)
    return Trainer(build_model(), args, shard={"stage": stage, **(options or {})}, **data)


def figures(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_alike(trainer: Any, reference: Any, **tolerance: float) -> None:
    """The same losses, norms and held-out losses at the same steps."""
    for key in ("loss", "grad_norm", "eval_loss"):
        found, expected = figures(trainer, key), figures(reference, key)
        assert len(found) == len(expected) > 0
        torch.testing.assert_close(found, expected, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


def train_alike(directory: str) -> None:
    ddp = make_trainer(Path(directory, "ddp"), None)
    ddp.train()
    expected = ddp.model.state_dict()
    predicted = ddp.predict(samples(5, seed=4))
    for stage, other_stage in ((0, 1), (3, 2)):
        folder = Path(directory, str(stage))
        trainer = make_trainer(folder, stage)
        trainer.train()
        assert_alike(trainer, ddp)
        assert type(trainer.model_wrapped).__name__ == "Qwen3ForCausalLM"
        # Of the best step, which is what both have loaded at the end.
        assert trainer.state.best_global_step == ddp.state.best_global_step
        best = zerocore.full_state_dict(trainer.model, rank0_only=False)
        torch.testing.assert_close(best, dict(expected), rtol=1e-3, atol=1e-5)
        found = trainer.predict(samples(5, seed=4))
        torch.testing.assert_close(found.predictions, predicted.predictions, rtol=1e-3, atol=1e-4)
        resumed = make_trainer(folder, other_stage)
        resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
        torch.testing.assert_close(
            figures(resumed, "loss"), figures(ddp, "loss"), rtol=1e-4, atol=1e-5
        )
    check_files(folder, best)
    from_ddp(Path(directory, "ddp"), ddp)


def check_files(folder: Path, best: dict[str, torch.Tensor]) -> None:
    """Checkpoints are of Hugging Face's format, too."""
    from transformers import Qwen3ForCausalLM

    saved = Qwen3ForCausalLM.from_pretrained(folder / f"checkpoint-{STEPS}")
    assert saved.state_dict().keys() == best.keys()
    zeros = [name for name, value in saved.state_dict().items() if not value.any()]
    assert zeros == []


def from_ddp(folder: Path, ddp: Any) -> None:
    """A checkpoint of DDP's trainer is resumed sharded."""
    resumed = make_trainer(folder, 3)
    resumed.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}"))
    torch.testing.assert_close(figures(resumed, "loss"), figures(ddp, "loss"), rtol=1e-4, atol=1e-5)


def test_training_evaluation_and_resume_are_those_of_ddp(tmp_path: Path) -> None:
    run_ranks(train_alike, 2, str(tmp_path), launch="torchrun", timeout=200)


def compute_in_bf16(directory: str) -> None:
    changes = {"bf16": True, "save_strategy": "no", "load_best_model_at_end": False}
    ddp = make_trainer(Path(directory, "ddp"), None, **changes)
    ddp.train()
    trainer = make_trainer(Path(directory, "3"), 3, **changes)
    dtypes = set()
    layer = trainer.model.model.layers[0].mlp
    layer.register_forward_pre_hook(lambda _, args: dtypes.add(args[0].dtype))
    trainer.train()
    assert dtypes == {torch.bfloat16}
    assert {param.dtype for param in trainer.model.parameters()} == {torch.float32}
    assert_alike(trainer, ddp, rtol=0.03, atol=0.03)


@pytest.mark.nightly
def test_bf16_is_mixed_precision(tmp_path: Path) -> None:
    run_ranks(compute_in_bf16, 2, str(tmp_path), launch="torchrun", timeout=120)


def generate_and_refuse(directory: str) -> None:
    from zerocore.integrations.transformers import Trainer

    trainer = make_trainer(Path(directory), 3)
    model, rank = trainer.model, trainer.args.process_index
    prompt = torch.tensor([[1, 2, 3]])
    # Without it the rank that ends first leaves the other one alone with its gathers.
    tokens = model.generate(
        input_ids=prompt, min_new_tokens=1 + 6 * rank, max_new_tokens=1 + 6 * rank
    )
    assert tokens.shape[1] == 4 + 6 * rank
    args = arguments(Path(directory), bf16=True)
    with pytest.raises(ValueError, match=r"Trainer is set to bf16.*would have no effect"):
        Trainer(zerocore.shard(build_model()), args)
    with pytest.raises(ValueError, match="bf16_full_eval cannot be used"):
        make_trainer(Path(directory), 3, bf16_full_eval=True)
    with pytest.raises(ValueError, match="sharded already; leave out"):
        Trainer(model, arguments(Path(directory)), shard={"stage": 2})
    own = {"communication": zerocore.Communication(prefetch=2)}
    for broadcasts in (True, False):
        args = {"options": own, "ddp_broadcast_buffers": broadcasts}
        model = make_trainer(Path(directory), 3, **args).model
        expected = zerocore.Communication(prefetch=2, sync_buffers=broadcasts, regather=1)
        assert state_of(model).config.communication == expected


def test_generation_and_refusals(tmp_path: Path) -> None:
    run_ranks(generate_and_refuse, 2, str(tmp_path), launch="torchrun", timeout=120)
