"""Runs: their config, their folder with metrics and checkpoints, their trainers, and sweeps of runs."""
