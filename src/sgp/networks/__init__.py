"""The networks of the paper, as plain modules that know nothing of continual learning."""
