"""Trainers and makers as plain classes. `coati.ray` makes actors of them; the synchronous run has one of each."""
