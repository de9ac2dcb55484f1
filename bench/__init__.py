"""Speed and memory, measured side by side with what was published. Run it by ``python -m bench``."""
