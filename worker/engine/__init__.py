"""Engines: the contract, the Paddle one, and a deterministic fake for tests."""
