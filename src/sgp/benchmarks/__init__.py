"""Streams of tasks with their protocol, and the metrics that are taken on them."""
