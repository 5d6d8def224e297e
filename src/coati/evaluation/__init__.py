"""Evaluation of a policy on sets of prompts, during a run or by itself."""
