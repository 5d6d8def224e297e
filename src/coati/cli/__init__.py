"""The `coati` command."""
