"""Trainers and makers as plain classes. `coati.ray` wraps them in actors; the synchronous run uses one of each."""
