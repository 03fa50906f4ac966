"""Headrace beside what others have, on one endpoint with the same prompts: who is fast, and who loses what when it is
killed or the endpoint is away. Each peer has a venv of its own (setup.sh); none is part of our install.
"""
