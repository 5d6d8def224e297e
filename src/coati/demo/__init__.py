"""What `coati demo` runs on, without a network: a film grammar, a small model of it and a reward.

Importing the package imports nothing else, so that naming it stays free of torch.
"""
