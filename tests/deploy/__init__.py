"""compose.yaml and the Dockerfile, as far as a machine without Docker can prove them."""
