"""The buffers in which samples wait for a trainer. `utils` has the contract's names."""
