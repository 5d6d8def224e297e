"""What `coati demo` runs on, without a network: a film grammar, a small model of it, a reward and a plot.

Importing the package imports nothing else, so that naming it stays free of torch.
"""
