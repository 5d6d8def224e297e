"""Two real ranks for tests/ranks/test_ranks.py: `python -m ranks FOLDER`, once for all of its tests."""
