"""The inputs of `coati demo`, which needs no network: a film grammar, a small model of it, and a reward."""
