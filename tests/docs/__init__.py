"""The documentation is true: its commands are played, its links lead somewhere, the reference is current."""
