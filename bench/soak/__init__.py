"""Reliability campaign: many tasks, kills, damaged files, a lost worker and a full disk. ``make soak`` runs it."""
