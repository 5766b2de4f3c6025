"""Requests, scheduling and the speculative loop: Python and numpy, no torch, no Triton."""
