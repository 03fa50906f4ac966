"""From a dataset row to a task in Redis: read, recognise, identify, render, tokenize, enqueue with back-pressure."""
