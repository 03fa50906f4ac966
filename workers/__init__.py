"""From a task in Redis to lines in the files: claim, lease, generate, publish; and the collector that writes."""
