"""Benchmarks and launch-parameter tuning; imports the other packages, and none of them imports it."""
