"""The walls between rooms, read from the code."""
