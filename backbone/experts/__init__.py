"""Compute experts, here or elsewhere: the kernel, the dispatcher and what both mean."""
