"""Greedy decoding and error rates."""
