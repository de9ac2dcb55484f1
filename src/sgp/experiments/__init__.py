"""What a run is and what it leaves behind: its config, its folder, its checkpoints and its metrics."""
