from evaluation_sets import config_of, words  # noqa: F401
