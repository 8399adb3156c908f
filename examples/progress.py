"""Shows the progress of training: a bar on a terminal, otherwise a line now and then."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

NUM_LINES = 10
SMOOTHING = 0.9


class TrainingProgress:
    """A display of loss (smoothed) and tokens per second of all ranks, as a context manager."""

    def __init__(self, console: Console, num_steps: int, num_tokens_per_step: int) -> None:
        self._console = console
        self._num_tokens_per_step = num_tokens_per_step
        self._num_done = 0
        self._loss = 0.0
        self._started = time.perf_counter()
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=num_steps, loss=0.0, speed=0.0)

    def __enter__(self) -> TrainingProgress:
        self._started = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    @property
    def seconds(self) -> float:
        """The time since training began."""
        return time.perf_counter() - self._started

    def advance(self, loss: float, num_steps: int) -> None:
        """Counts a step, now of `num_steps`, with a loss of `loss` nats per byte."""
        keep = SMOOTHING if self._num_done else 0.0
        self._loss = keep * self._loss + (1 - keep) * loss
        self._num_done += 1
        speed = self._num_done * self._num_tokens_per_step / self.seconds
        self._bar.update(self._task, advance=1, total=num_steps, loss=self._loss, speed=speed)
        every = max(1, num_steps // NUM_LINES)
        if not self._console.is_terminal and self._num_done % every == 0:
            self._console.print(
                f"step {self._num_done}/{num_steps}  loss {self._loss:.3f}  {speed:,.0f} tokens/s"
            )
