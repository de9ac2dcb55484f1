"""Settings of each benchmark, and the shapes that they give. Nothing here imports torch."""
