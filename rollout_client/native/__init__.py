"""C for what numpy does in several passes over a model's bytes; everything works without."""
