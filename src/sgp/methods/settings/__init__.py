"""Settings and facts of each method. Nothing here imports torch, so the command line starts quickly."""
