"""The maths of training from feedback: pure functions of tensors and floats.

Shapes are `[B, T]` (batch, response tokens), with a bool mask that is True on response tokens. Values on padding never
affect a result or a gradient, even if they are nan. Half-precision inputs are computed in float32; float64 stays
float64. Callers pass in denominators, so micro-batches add up.
"""
