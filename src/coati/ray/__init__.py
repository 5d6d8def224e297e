"""The actors of the contract, and the launcher: the only package that imports Ray."""
