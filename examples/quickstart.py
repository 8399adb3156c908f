"""Fine-tunes a Hugging Face model on all ranks, saves it and loads it again.

    torchrun --nproc-per-node 2 examples/quickstart.py [--model FOLDER_OR_NAME] [--out FOLDER]

Without --model it makes a small one with random weights in OUT/base, without the hub.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

import zerocore

SMALL = Qwen3Config(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
)  # fmt: skip


def make_small_model(folder: Path) -> Path:
    """Saves a model with random weights, like a downloaded one."""
    if dist.get_rank() == 0 and not folder.exists():
        AutoModelForCausalLM.from_config(SMALL).save_pretrained(folder)
    dist.barrier()
    return folder


def sample(text: torch.Tensor, step: int) -> torch.Tensor:
    """Draws this rank's batch of a step: 8 windows of 64 tokens."""
    torch.manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - 64, (8,))
    return torch.stack([text[start : start + 64] for start in starts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder of save_pretrained, or a name on the hub")
    parser.add_argument("--out", type=Path, default=Path("quickstart"), help="folder of the result")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()
    source = options.model or make_small_model(options.out / "base")

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).to(device)
    model = zerocore.shard(model, stage=3)
    optimizer = zerocore.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoints = zerocore.Checkpoints(options.out / "checkpoints", model, optimizer, keep=2)
    first = checkpoints.load() or 0  # the newest checkpoint; None if there is none
    if first and dist.get_rank() == 0:
        print(f"resumes after step {first}")

    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)  # bytes as tokens
    for step in range(first + 1, options.steps + 1):
        batch = sample(text, step)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        zerocore.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            checkpoints.save(step)  # in the background, while training goes on
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}")
    checkpoints.wait()

    tuned = options.out / f"tuned-{options.steps}"
    zerocore.save_safetensors(model, tuned)
    if dist.get_rank() == 0:
        model.config.save_pretrained(tuned)
        again = AutoModelForCausalLM.from_pretrained(tuned)
        print(f"reloaded {sum(p.numel() for p in again.parameters()):,} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
