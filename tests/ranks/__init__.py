"""Two real ranks for tests/ranks/test_ranks.py, started once for all its tests with `python -m ranks FOLDER`."""
