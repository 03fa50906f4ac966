"""Whole runs in real processes, as people start them: killed, cut off, starved, and complete in the end."""
