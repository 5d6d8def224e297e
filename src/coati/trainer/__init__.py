"""Learning: the PPO step, the fit loop, optimizers, schedules and strategies."""
