"""Prompts: reading them from files and datasets, and turning them into an endless, keyed stream of batches."""
