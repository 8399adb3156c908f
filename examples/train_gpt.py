"""Trains a byte-level GPT on Python's own text; shows the memory and collectives of each stage.

Run it directly (two ranks on the CPU, or one per GPU), or under torchrun.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.multiprocessing as mp
import typer
from gpt import GPT, GPTConfig, generate
from launch import LaunchError, Rank, run_on_ranks
from progress import TrainingProgress
from rich.console import Console
from stage_figures import StageFigures, collect_figures
from summary import RunSummary
from text_data import Corpus, load_corpus
from training import Trainer, TrainingConfig

import zerocore

PROMPT = b"def "
NUM_SAMPLE_TOKENS = 300
NUM_RECORDED_STEPS = 10
ALL_STAGES = (0, 1, 2, 3)


@dataclass(frozen=True)
class Job:
    """The options of a run, the same on every rank."""

    training: TrainingConfig
    gpt: GPTConfig
    max_seconds: float
    json_path: Path | None
    checkpoint: Path | None = None
    resume: bool = False
    save_every: int = 100


def work(rank: Rank, job: Job) -> None:
    """Trains, evaluates and probes the other stages; rank 0 prints and writes the result."""
    console = Console(quiet=not rank.is_first)
    corpus = load_corpus()
    _print_start(console, rank, job, corpus)
    trainer = Trainer(job.training, job.gpt, rank, corpus.train)
    checkpoints = _checkpoints(trainer, job, console)
    before = trainer.evaluate(corpus.held_out)
    figures, seconds = _train(trainer, job, console, checkpoints)
    after = trainer.evaluate(corpus.held_out)
    losses = trainer.mean_losses()
    num_tokens = (len(losses) - trainer.num_resumed) * trainer.num_tokens_per_step
    weights = zerocore.full_state_dict(trainer.model)
    all_figures = [
        figures if stage == job.training.stage else _probe(stage, job, rank, corpus)
        for stage in ALL_STAGES
    ]
    if not rank.is_first:
        return
    model = GPT(job.gpt)
    model.load_state_dict(weights)
    summary = RunSummary(
        settings=_settings(job, rank, trainer),
        losses=losses,
        held_out_before=before,
        held_out_after=after,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds,
        prompt=PROMPT,
        sample=generate(model, PROMPT, NUM_SAMPLE_TOKENS, seed=job.training.seed),
        figures=all_figures,
    )
    summary.print(console)
    if job.json_path:
        job.json_path.write_text(json.dumps(summary.to_json(), indent=1) + "\n")


def _checkpoints(trainer: Trainer, job: Job, console: Console) -> zerocore.Checkpoints | None:
    """Makes the checkpoints; with --resume, loads the newest one, of any number of ranks."""
    if job.checkpoint is None:
        return None
    checkpoints = zerocore.Checkpoints(
        job.checkpoint, trainer.model, trainer.optimizer, stateful={"trainer": trainer}
    )
    if job.resume:
        console.print(f"resumed at step: {checkpoints.load()}")
    return checkpoints


def _train(
    trainer: Trainer, job: Job, console: Console, checkpoints: zerocore.Checkpoints | None
) -> tuple[StageFigures, float]:
    """Trains to the end; returns the figures of the last steps, and seconds for all steps."""
    bar = TrainingProgress(console, trainer.num_steps, trainer.num_tokens_per_step)

    num_recorded = min(NUM_RECORDED_STEPS, trainer.num_steps // 2)

    def advance() -> None:
        bar.advance(trainer.losses[-1], trainer.num_steps)
        step = len(trainer.losses)
        if checkpoints is not None and step % job.save_every == 0:
            checkpoints.save(step)  # a thread writes it while training continues

    with bar:
        trainer.run_within(job.max_seconds, num_recorded, advance)
        with zerocore.reporting.record_events(trainer.model) as events:
            trainer.run(num_recorded, advance)
        seconds = bar.seconds
    if checkpoints is not None:
        checkpoints.wait()
    return _figures(trainer, events, num_recorded), seconds


def _probe(stage: int, job: Job, rank: Rank, corpus: Corpus) -> StageFigures:
    """Takes two steps of the same model at another stage; records the second, steady one."""
    trainer = Trainer(replace(job.training, stage=stage), job.gpt, rank, corpus.train)
    trainer.run(1)
    with zerocore.reporting.record_events(trainer.model) as events:
        trainer.run(1)
    return _figures(trainer, events, 1)


def _figures(
    trainer: Trainer, events: list[zerocore.reporting.Event], num_steps: int
) -> StageFigures:
    return collect_figures(
        trainer.model, trainer.optimizer, events, stage=trainer.config.stage, num_steps=num_steps
    )


def _print_start(console: Console, rank: Rank, job: Job, corpus: Corpus) -> None:
    console.print(
        f"text: {corpus.train.numel():,} bytes of {corpus.num_train_files} files; held out: "
        f"{corpus.held_out.numel():,} bytes of {corpus.num_held_out_files}"
    )
    console.print(
        f"GPT of {_num_parameters(job.gpt):,} parameters, stage {job.training.stage}, "
        f"{rank.world_size} ranks on {rank.device.type}"
    )


def _num_parameters(config: GPTConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in GPT(config).parameters())


def _settings(job: Job, rank: Rank, trainer: Trainer) -> dict[str, Any]:
    return {
        **asdict(job.training),
        "num_steps": trainer.num_steps,
        "gpt": asdict(job.gpt),
        "num_parameters": _num_parameters(job.gpt),
        "world_size": rank.world_size,
        "device": rank.device.type,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def main(
    stage: Annotated[int, typer.Option(min=0, max=3, help="ZeRO stage to train at.")] = 3,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Number of ranks; default: all GPUs, or 2.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Training steps.")] = 150,
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Take fewer steps if training would last longer.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and sample.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all figures to this file.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder that checkpoints are written to.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest checkpoint there.")
    ] = False,
    save_every: Annotated[int, typer.Option(min=1, help="Steps from save to save.")] = 100,
) -> None:
    """Train a byte-level GPT on Python's own text over several ranks."""
    if device not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"device is {device!r}; expected cpu, cuda or auto")
    if resume and checkpoint is None:
        raise typer.BadParameter("--resume needs --checkpoint, the folder to resume from")
    training = TrainingConfig(stage=stage, num_steps=steps, seed=seed)
    job = Job(training, GPTConfig(), 60 * minutes, json_path, checkpoint, resume, save_every)
    try:
        run_on_ranks(work, job, num_ranks=ranks, device_type=device)
    except LaunchError as error:
        raise typer.BadParameter(str(error)) from error
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        Console(stderr=True).print(f"a rank failed, the others were ended: {error}", markup=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
