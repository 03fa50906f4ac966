"""How SGLang speaks: what Headrace asks an endpoint, what it answers, and a simulated one for tests and demo."""
