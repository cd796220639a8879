"""Engines: the contract, its sizes, and the engine on Paddle; the one on a GPU is worker/gpu."""
