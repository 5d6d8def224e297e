"""The learner: the PPO step, optimizers, schedules, strategies and checkpoints. `coati.actors` has its trainers."""
