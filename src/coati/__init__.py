"""Detached reinforcement learning from feedback for language models.

Experience makers generate and score text in their own Ray actors, trainers learn from a replay buffer in
theirs, and new weights flow back while both keep working. `import coati` is light: it pulls in neither torch
nor Ray. `docs/design.md` maps the rooms; `coati.ray` is the only one that imports Ray (with `coati.cli`).
"""

__version__ = "0.1.0"
