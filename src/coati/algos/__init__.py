"""The maths of training from feedback: pure functions of tensors and floats.

Shapes are `[B, T]`, batch times response tokens, with a bool mask that is True on response tokens. What lies
under a False never reaches a result or a gradient, whatever it is. Half-precision inputs are computed in
float32; float64 stays float64. Denominators come from outside, so micro-batches add up.
"""
