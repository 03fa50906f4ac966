"""Several rooms together, on a real private Redis and against the simulated SGLang."""
