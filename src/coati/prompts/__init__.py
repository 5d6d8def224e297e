"""Prompts: read from files and datasets, and served as an endless stream that every maker can look up."""
