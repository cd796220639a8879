"""Stores of several hosts as one tree: pushes are forwarded while they arrive, a commit is one for all of them."""
