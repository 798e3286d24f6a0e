"""Hugging Face Trainer: a tiny Llama with onepass's norms and Lion learns to continue Python source.

Run: python examples/hf_trainer.py      needs: pip install transformers accelerate
"""

from __future__ import annotations

import argparse
import inspect
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import onepass
from onepass.optim import Lion

LENGTH = 64


def sequences() -> list[dict[str, torch.Tensor]]:
    """The bytes of a module of the standard library, cut into sequences; a byte is a token."""
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    return [{"input_ids": part, "labels": part} for part in text.split(LENGTH)[:-1]]


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    print(onepass.swap(model))  # before the Trainer wraps the model

    steps = 60
    # Lion takes a third to a tenth of AdamW's rate, and as many times its decay: docs/lion.md
    optimizer = Lion(model.parameters(), lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            output_dir=out,
            max_steps=steps,
            per_device_train_batch_size=16,
            logging_steps=20,
            save_strategy="no",
            report_to=[],
            use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=sequences(), optimizers=(optimizer, schedule))
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        model.save_pretrained(out)  # an ordinary checkpoint: the keys are those of Llama
        again = LlamaForCausalLM.from_pretrained(out)
    print(f"loss {float(losses[0]):.2f} to {float(losses[-1]):.2f}")
    token = torch.tensor([[100]], device=model.device)
    difference = (again.to(model.device)(token).logits - model(token).logits).abs().max()
    print(f"logits of the reloaded model without onepass differ by {difference:.1e}")


if __name__ == "__main__":
    main()
