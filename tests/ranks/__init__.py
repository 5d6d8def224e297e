"""Two real ranks for tests/unit/trainer/test_ranks.py: `python -m ranks FOLDER`, once for all of its tests."""
