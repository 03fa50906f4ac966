"""One module each; nothing but it, or a real Redis where that is what it speaks to."""
