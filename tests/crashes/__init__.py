"""The real process is killed at every step from row to sample; lines and requests are counted."""
