"""Programs: tiny Hugging Face models with random weights."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.distributed.programs.models import sgd, update
from tests.distributed.programs.registry import program
from tests.distributed.programs.run import Run

VOCABULARY = 31


def decoder(tied: bool = False) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=16,
            tie_word_embeddings=tied,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).train()


def train_language(run: Run, model: Any, steps: int = 2) -> None:
    """The plainest loop over tokens."""
    optimizer = sgd(model)
    for step in range(steps):
        tokens = run.tokens(VOCABULARY - 3, 2, 6, key=step) + 3
        update(run, model, optimizer, model(input_ids=tokens, labels=tokens).loss)


@program("LlamaForCausalLM", needs="transformers")
def hf_llama(run: Run) -> None:
    train_language(run, run.shard(decoder()))


@program("LlamaForCausalLM, its decoder layers as units", needs="transformers")
def hf_llama_units(run: Run) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    train_language(run, run.shard(decoder(), [LlamaDecoderLayer]))


@program("LlamaForCausalLM with a tied head, its decoder layers as units", needs="transformers")
def hf_llama_tied(run: Run) -> None:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    train_language(run, run.shard(decoder(tied=True), [LlamaDecoderLayer]))


@program("LlamaForCausalLM with gradient checkpointing", needs="transformers")
def hf_llama_checkpointing(run: Run) -> None:
    net = decoder()
    net.gradient_checkpointing_enable()
    train_language(run, run.shard(net))


@program("LlamaForCausalLM with .to(device) after sharding, as trainers do", needs="transformers")
def hf_llama_moved(run: Run) -> None:
    model = run.shard(decoder())
    model.to(torch.device("cpu", 0))
    train_language(run, model)


@program("generate between training steps", needs="transformers")
def hf_generate(run: Run) -> None:
    model = run.shard(decoder())
    train_language(run, model)
    prompt = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        tokens = run.module(model).generate(prompt, max_new_tokens=4, min_new_tokens=4)
    run.record(tokens)
    train_language(run, model)


@program("model.model(...) and the head's weight for a loss in chunks (TRL)", needs="transformers")
def hf_chunked_head(run: Run) -> None:
    model = run.shard(decoder())
    optimizer = sgd(model)
    net = run.module(model)
    for step in range(2):
        tokens = run.tokens(VOCABULARY, 2, 6, key=step)
        hidden = net.model(input_ids=tokens).last_hidden_state
        logits = hidden @ net.lm_head.weight.t()
        update(run, model, optimizer, logits.square().mean())


@program("save_pretrained without state_dict, loaded again", needs="transformers")
def hf_save_pretrained(run: Run) -> None:
    from transformers import LlamaForCausalLM

    model = run.shard(decoder())
    train_language(run, model)
    with tempfile.TemporaryDirectory() as folder:
        run.module(model).save_pretrained(Path(folder))
        if run.rank == 0:  # the only one that writes
            twin = LlamaForCausalLM.from_pretrained(Path(folder))
            run.record(twin(input_ids=torch.tensor([[4, 5, 6]])).logits)


@program("save_pretrained with the full state, loaded again", needs="transformers")
def hf_save_pretrained_full(run: Run) -> None:
    from transformers import LlamaForCausalLM

    model = run.shard(decoder())
    train_language(run, model)
    state = run.full_state(model)
    with tempfile.TemporaryDirectory() as folder:
        run.module(model).save_pretrained(Path(folder), state_dict=state)
        if run.rank == 0:  # the only one that writes
            twin = LlamaForCausalLM.from_pretrained(Path(folder))
            run.record(twin(input_ids=torch.tensor([[4, 5, 6]])).logits)


@program("resize_token_embeddings after sharding", needs="transformers")
def hf_resize(run: Run) -> None:
    model = run.shard(decoder())
    run.module(model).resize_token_embeddings(VOCABULARY + 3, mean_resizing=False)
    train_language(run, model)


@program("BertForMaskedLM, tied", needs="transformers")
def hf_bert(run: Run) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=16,
    )
    train_language(run, run.shard(BertForMaskedLM(config).train()))


@program("GPT2LMHeadModel, tied, its blocks as units", needs="transformers")
def hf_gpt2(run: Run) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=8,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    train_language(run, run.shard(GPT2LMHeadModel(config).train(), [GPT2Block]))


@program("T5ForConditionalGeneration", needs="transformers")
def hf_t5(run: Run) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    train_language(run, run.shard(T5ForConditionalGeneration(config).train()))


@program("ViTForImageClassification", needs="transformers")
def hf_vit(run: Run) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    model = run.shard(ViTForImageClassification(config).train())
    optimizer = sgd(model)
    for x in run.batches(2, 2, 3, 8, 8):
        update(run, model, optimizer, model(pixel_values=x, labels=torch.tensor([0, 2])).loss)


@program("a LoRA adapter on a frozen Llama", needs="peft")
def hf_lora(run: Run) -> None:
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = run.shard(peft.get_peft_model(decoder(), config))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    for step in range(2):
        tokens = run.tokens(VOCABULARY, 2, 6, key=step)
        update(run, model, optimizer, model(input_ids=tokens, labels=tokens).loss)


@program("a value head on a Llama (output_hidden_states)", needs="transformers")
def hf_value_head(run: Run) -> None:
    class Valued(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llm, self.value = decoder(), torch.nn.Linear(8, 1)

        def forward(self, tokens: Any) -> Any:
            output = self.llm(input_ids=tokens, output_hidden_states=True)
            return self.value(output.hidden_states[-1]).squeeze(-1) + output.logits.mean()

    model = run.shard(Valued())
    optimizer = sgd(model)
    for step in range(2):
        update(run, model, optimizer, model(run.tokens(VOCABULARY, 2, 6, key=step)).mean())
