"""Faults that others met in this kind of work, each as a small test named after its rule."""
