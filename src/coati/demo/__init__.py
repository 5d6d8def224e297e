"""What `coati demo` runs on, without a network: a film grammar, a small model of it and a reward."""
