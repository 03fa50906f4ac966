"""The command line: the composition root, where producers, workers and app meet. Everything is imported when needed."""
