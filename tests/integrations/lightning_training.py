"""Lightning's Trainer as its tests want it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MICRO_BATCHES = 2


def quiet_trainer(folder: Path | str, strategy: Any, **options: Any) -> Any:
    """Two processes on the CPU, which write nothing by themselves."""
    import lightning

    return lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        **options,
    )


def make_trainer(folder: Path, strategy: Any, steps: int, **options: Any) -> Any:
    """A quiet trainer that accumulates and clips gradients."""
    return quiet_trainer(
        folder,
        strategy,
        max_steps=steps,
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=0.1,
        **options,
    )
