"""Weights on their way from trainers to makers: sent in chunks, staged, verified, committed whole.

sender ── WeightMessage: header, chunks, manifest ──► receiver ── VerifiedUpdate ──► served models
"""
