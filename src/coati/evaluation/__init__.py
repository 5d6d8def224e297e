"""Evaluation: sets of prompts that a version of the policy is measured on, alone or while it trains."""
