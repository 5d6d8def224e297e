"""Reward functions: those of the library, how one is found and called, and the child process that runs it. No torch."""
