"""Readers of the published data sets, in the formats in which they are published."""
