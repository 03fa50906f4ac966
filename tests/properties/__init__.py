"""What must hold for whatever comes: generated cases, by Hypothesis."""
