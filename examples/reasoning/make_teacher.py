"""Train the teacher of distill.toml: a Llama larger than the student, trained until it is good at the task.

    python examples/reasoning/make_teacher.py      # after prepare.py

It learns from the training rows only and has the student's vocabulary, which distillation requires.
"""

import json

from prepare import FOLDER, make_model, make_tokenizer, teach

STEPS = 300


def main() -> None:
    """Train the teacher and save it."""
    rows = [json.loads(line) for line in (FOLDER / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    tokenizer = make_tokenizer()
    teacher = make_model(tokenizer, hidden_size=128, num_layers=3)
    teach(teacher, tokenizer, rows, STEPS)
    teacher.save_pretrained(FOLDER / "teacher")
    tokenizer.save_pretrained(FOLDER / "teacher")
    print(f"{FOLDER / 'teacher'}: {teacher.num_parameters():,} weights")


if __name__ == "__main__":
    main()
