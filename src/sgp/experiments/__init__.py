"""Runs: their config, trainers, folder, checkpoints and metrics, and sweeps of runs."""
