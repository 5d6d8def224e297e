"""Weight updates from trainers to makers: sent in chunks, staged, verified, and committed as a whole.

sender ── WeightMessage: header, chunks, manifest ──► receiver ── VerifiedUpdate ──► served models
"""
