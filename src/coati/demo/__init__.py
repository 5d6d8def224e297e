"""What `coati demo` runs on, with no network: a film grammar, a small model of it, a reward and a report.

Start at `coati.demo.cache.ensure_base_model` for the model and `coati.demo.grammar.PROMPTS` for the prompts.
This package imports nothing by itself, so that naming it stays free of torch.
"""
