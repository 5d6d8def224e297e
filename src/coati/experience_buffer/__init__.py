"""Buffers that hold samples until a trainer takes them. `utils` has the contract's names."""
