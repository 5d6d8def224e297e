"""Learning: the PPO step, optimizers, schedules, strategies and checkpoints."""
