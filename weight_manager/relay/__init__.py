"""Stores of several hosts as one fleet: pushes are forwarded while they arrive, commits are fleet-wide."""
