"""Prepare the runs in this folder without downloads: write the task's prompts and train a small base model.

    python examples/reasoning/prepare.py

The task is `spell_backward` of reasoning-gym. `runs/reasoning/train.jsonl` and `held_out.jsonl` have no word in common.
The model is a small Llama; the task's sentence is one token, and so is each letter. Supervised training stops long
before the model is good at the task, and reinforcement learning with the task's verifier continues from there.
"""

import json
import random
from pathlib import Path

import reasoning_gym
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coati.devices import set_up_cpu

FOLDER = Path("runs/reasoning")
SENTENCE = "Spell this word backward (example: sun -> nus): "
NUM_TRAIN, NUM_HELD_OUT = 4000, 256
STEPS, BATCH_SIZE, LEARNING_RATE = 60, 64, 2e-3


def make_rows() -> list[dict]:
    """Return rows with distinct words of three to six letters."""
    task = reasoning_gym.create_dataset("spell_backward", seed=1, size=20_000, min_word_len=3, max_word_len=6)
    entries = {entry["answer"]: entry for entry in task if entry["answer"].islower()}
    answers = sorted(entries)
    random.Random(1).shuffle(answers)
    return [
        {"prompt": f"{entry['question']}\n", "answer": entry["answer"], "metadata": entry["metadata"]}
        for entry in map(entries.__getitem__, answers[: NUM_TRAIN + NUM_HELD_OUT])
    ]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer for the task's sentence, letters, and the newline after a question."""
    tokens = ["<pad>", "<bos>", "<eos>", SENTENCE, "\n", *"abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, unk_token="<pad>"))
    sentence = SENTENCE.replace("(", r"\(").replace(")", r"\)")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(f"{sentence}|[\\s\\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)


def make_model(tokenizer: PreTrainedTokenizerFast, hidden_size: int = 64, num_layers: int = 2) -> LlamaForCausalLM:
    """Return a Llama with seeded random weights."""
    set_up_cpu(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config)


def teach(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, rows: list[dict], steps: int) -> None:
    """Train the model on answers for `steps` steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    rng = random.Random(0)
    for step in range(1, steps + 1):
        batch = rng.sample(rows, BATCH_SIZE)
        texts = [f"{row['prompt']}{row['answer']}<eos>" for row in batch]
        ids = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").input_ids
        is_answer = (ids == tokenizer.convert_tokens_to_ids("\n")).cumsum(1).bool() & (ids > 1)
        labels = ids.masked_fill(~is_answer | (ids == tokenizer.convert_tokens_to_ids("\n")), -100)
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}")


def main() -> None:
    """Write the prompts and the model."""
    rows = make_rows()
    train, held_out = rows[:-NUM_HELD_OUT], rows[-NUM_HELD_OUT:]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", train), ("held_out", held_out)):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    teach(model, tokenizer, train, STEPS)
    model.save_pretrained(FOLDER / "base")
    tokenizer.save_pretrained(FOLDER / "base")
    print(f"{FOLDER}: {len(train):,} training rows, {len(held_out)} held-out rows, and the model in base/")


if __name__ == "__main__":
    main()
